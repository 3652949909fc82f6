//! Every call into the MPI library. Return codes become [`Error::Mpi`]; counts are made to fit MPI's `int`.
//!
//! [`World`] holds raw pointers and is therefore neither `Send` nor `Sync`: it stays on the thread that made it.

use crate::transport::HEADER_BYTES;
use crate::{Error, Group, Result};
use ::mpi::ffi;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether MPI is initialised and not yet finalised.
static UP: AtomicBool = AtomicBool::new(false);

/// Tag of the headers; all other traffic is collective.
const HEADER_TAG: c_int = 1;

/// MPI after `MPI_Init_thread`, on `MPI_COMM_WORLD`.
pub(super) struct World {
    rank: usize,
    size: usize,
    /// `size + 1` headers: one from each rank (this rank's own written by itself), then the outgoing one.
    headers: *mut u8,
    /// Persistent requests: a receive from every other rank in rank order, then a send to each.
    requests: Vec<ffi::MPI_Request>,
    /// The world itself, then what [`World::members`] has made.
    groups: Vec<(Group, Members)>,
}

/// An MPI communicator of this rank and those it moves data with.
pub(super) struct Members {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
}

/// What MPI sees of a dtype. bf16 is only moved, never added by MPI, so any 16-bit type does.
#[derive(Debug, Clone, Copy)]
pub(super) enum Element {
    F32,
    U16,
    Byte,
}

impl Element {
    fn size(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::U16 => 2,
            Element::Byte => 1,
        }
    }

    fn datatype(self) -> ffi::MPI_Datatype {
        // SAFETY: constants of the linked MPI library, never written.
        unsafe {
            match self {
                Element::F32 => ffi::RSMPI_FLOAT,
                Element::U16 => ffi::RSMPI_UINT16_T,
                Element::Byte => ffi::RSMPI_UINT8_T,
            }
        }
    }
}

fn comm_world() -> ffi::MPI_Comm {
    // SAFETY: a constant of the linked MPI library, never written.
    unsafe { ffi::RSMPI_COMM_WORLD }
}

/// Counts are at most the split limit, which `Comm::set_split_limit` keeps within `int`, or the number of ranks.
fn int(count: usize) -> c_int {
    debug_assert!(c_int::try_from(count).is_ok());
    count as c_int
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len: c_int = 0;
    // SAFETY: the buffer holds MPI_MAX_ERROR_STRING characters, as the call demands; it may be made at any time.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let known = told == ffi::MPI_SUCCESS as c_int;
    let text = if known { &text[..(len.max(0) as usize).min(text.len())] } else { b"unknown error".as_slice() };
    Err(Error::Mpi { call, code, message: String::from_utf8_lossy(text).into_owned() })
}

/// Ends all ranks if MPI is up; returns if it is not.
pub(crate) fn abort_all(code: i32) {
    if UP.swap(false, Ordering::SeqCst) {
        // SAFETY: MPI is initialised and not finalised, and was given with MPI_THREAD_MULTIPLE, so any thread may call.
        unsafe { ffi::MPI_Abort(comm_world(), code) };
    }
}

impl World {
    /// Initialises MPI, makes errors return codes, and prepares the exchange of headers.
    pub(super) fn init() -> Result<World> {
        let mut initialised: c_int = 0;
        // SAFETY: may be called at any time, also before MPI is initialised.
        check("MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut initialised) })?;
        if initialised != 0 {
            let what = "MPI was already initialised in this process".to_owned();
            return Err(Error::Launch { what, hint: "connect once".to_owned() });
        }
        let mut given: c_int = 0;
        // SAFETY: MPI is not initialised yet; null arguments are allowed since MPI-2.
        let code =
            unsafe { ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), ffi::RSMPI_THREAD_MULTIPLE, &mut given) };
        check("MPI_Init_thread", code)?;
        // SAFETY: MPI is initialised, and this thread did it.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(comm_world(), ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        let all = Members::of(comm_world())?;
        // SAFETY: a constant of the linked MPI library, never written.
        if given < unsafe { ffi::RSMPI_THREAD_MULTIPLE } {
            let what = "this MPI was built without MPI_THREAD_MULTIPLE, which stopping a broken job needs".to_owned();
            return Err(Error::Launch {
                what,
                hint: "use an Open MPI or MPICH built with it (the default)".to_owned(),
            });
        }
        UP.store(true, Ordering::SeqCst);
        let (rank, size) = (all.rank, all.size);
        // Leaked on purpose: after a time-out MPI may still write to it, whatever becomes of this struct.
        let headers = Box::leak(vec![0u8; (size + 1) * HEADER_BYTES].into_boxed_slice()).as_mut_ptr();
        let (requests, groups) = (Vec::with_capacity(2 * size), vec![(Group::World, all)]);
        let mut world = World { rank, size, headers, requests, groups };
        world.prepare_headers()?;
        Ok(world)
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size).filter(move |r| *r != rank)
    }

    fn header_slot(&self, slot: usize) -> *mut u8 {
        debug_assert!(slot <= self.size);
        // SAFETY: the allocation holds size + 1 headers.
        unsafe { self.headers.add(slot * HEADER_BYTES) }
    }

    fn prepare_headers(&mut self) -> Result<()> {
        let bytes = Element::Byte.datatype();
        for from in self.others() {
            let (at, mut request) = (self.header_slot(from).cast::<c_void>(), ptr_request_null());
            // SAFETY: HEADER_BYTES bytes at `at` belong to this request alone and are never freed.
            let code = unsafe {
                ffi::MPI_Recv_init(at, int(HEADER_BYTES), bytes, int(from), HEADER_TAG, comm_world(), &mut request)
            };
            check("MPI_Recv_init", code)?;
            self.requests.push(request);
        }
        for to in self.others() {
            let (at, mut request) = (self.header_slot(self.size).cast::<c_void>(), ptr_request_null());
            // SAFETY: HEADER_BYTES bytes at `at` are never freed and written only while no send is active.
            let code = unsafe {
                ffi::MPI_Send_init(at, int(HEADER_BYTES), bytes, int(to), HEADER_TAG, comm_world(), &mut request)
            };
            check("MPI_Send_init", code)?;
            self.requests.push(request);
        }
        Ok(())
    }

    /// Starts sending `header` to every rank and receiving theirs. The previous exchange must be done.
    pub(super) fn start_headers(&mut self, header: &[u8; HEADER_BYTES]) -> Result<()> {
        for slot in [self.rank, self.size] {
            // SAFETY: the slots are HEADER_BYTES long and no request is active, so nothing else accesses them.
            unsafe { ptr::copy_nonoverlapping(header.as_ptr(), self.header_slot(slot), HEADER_BYTES) };
        }
        // SAFETY: inactive persistent requests, as many as said; their buffers live for ever.
        check("MPI_Startall", unsafe { ffi::MPI_Startall(int(self.requests.len()), self.requests.as_mut_ptr()) })
    }

    /// Whether every header is here and every send done. Makes progress.
    pub(super) fn headers_done(&mut self) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: persistent requests of this struct, as many as said; the statuses are not wanted.
        let code = unsafe {
            let (n, requests) = (int(self.requests.len()), self.requests.as_mut_ptr());
            ffi::MPI_Testall(n, requests, &mut flag, ffi::RSMPI_STATUSES_IGNORE)
        };
        check("MPI_Testall", code)?;
        Ok(flag != 0)
    }

    /// Ranks whose header is not here.
    pub(super) fn headers_missing(&mut self) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        for (i, rank) in self.others().enumerate() {
            let mut flag: c_int = 0;
            // SAFETY: a persistent request of this struct; the call leaves it as it is.
            let code = unsafe { ffi::MPI_Request_get_status(self.requests[i], &mut flag, ffi::RSMPI_STATUS_IGNORE) };
            check("MPI_Request_get_status", code)?;
            if flag == 0 {
                missing.push(rank);
            }
        }
        Ok(missing)
    }

    /// The header `rank` sent in the exchange that [`World::headers_done`] has just reported done.
    pub(super) fn header_of(&self, rank: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        // SAFETY: the slot is HEADER_BYTES long, and no request is active, so MPI does not write to it.
        unsafe { ptr::copy_nonoverlapping(self.header_slot(rank), header.as_mut_ptr(), HEADER_BYTES) };
        header
    }

    /// This rank's group of a kind. The first call for a kind makes its communicators and has to be made by every rank of
    /// the world at the same place.
    pub(super) fn members(&mut self, group: Group) -> Result<&Members> {
        let known = self.groups.iter().position(|(known, _)| *known == group);
        let at = match known {
            Some(at) => at,
            None => {
                let (number, place) = (int(group.number(self.rank)), int(group.place(self.rank)));
                let mut comm = comm_world();
                // SAFETY: every rank of the world makes this call here (see above); the result goes to a local. The new
                // communicator inherits the world's error handler.
                let code = unsafe { ffi::MPI_Comm_split(comm_world(), number, place, &mut comm) };
                check("MPI_Comm_split", code)?;
                self.groups.push((group, Members::of(comm)?));
                self.groups.len() - 1
            }
        };
        Ok(&self.groups[at].1)
    }

    /// Ends MPI; waits for the other ranks to do the same.
    pub(super) fn finalize(mut self) -> Result<()> {
        for request in &mut self.requests {
            // SAFETY: an inactive persistent request of this struct, freed once.
            check("MPI_Request_free", unsafe { ffi::MPI_Request_free(request) })?;
        }
        for (_, members) in self.groups.iter_mut().skip(1) {
            // SAFETY: made by `members` and freed once, by every rank in the order of making, with nothing on its way.
            check("MPI_Comm_free", unsafe { ffi::MPI_Comm_free(&mut members.comm) })?;
        }
        UP.store(false, Ordering::SeqCst);
        // SAFETY: MPI is initialised, this thread did it, and it makes no further call.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

impl Members {
    fn of(comm: ffi::MPI_Comm) -> Result<Members> {
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: MPI is initialised and `comm` is not freed; the result goes to a local.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(comm, &mut rank) })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(comm, &mut size) })?;
        Ok(Members { comm, rank: rank as usize, size: size as usize })
    }

    /// `recv` becomes everybody's `send` in rank order, in messages of at most `limit` elements in all.
    pub(super) fn all_gather(&self, element: Element, send: &[u8], recv: &mut [u8], limit: usize) -> Result<()> {
        assert_eq!(recv.len(), send.len() * self.size, "checked by Comm");
        self.in_pieces(element, send.len() / element.size(), limit, |offset, whole, piece| {
            let (at, datatype) = (offset * element.size(), element.datatype());
            // SAFETY: `send` holds `count` elements from `at`; block r of the receive type lies at r times the stride
            // and ends within `recv`. MPI does not keep the pointers, and the borrow checker keeps the slices apart.
            let code = unsafe {
                let from = send.as_ptr().add(at).cast::<c_void>();
                let into = recv.as_mut_ptr().add(at).cast::<c_void>();
                let (count, block, blocks) = (int(whole), piece.datatype, piece.count);
                ffi::MPI_Allgather(from, count, datatype, into, blocks, block, self.comm)
            };
            check("MPI_Allgather", code)
        })
    }

    /// Slice r of `recv` becomes this rank's slice of rank r's `send`, in messages of at most `limit` elements in all.
    pub(super) fn all_to_all(&self, element: Element, send: &[u8], recv: &mut [u8], limit: usize) -> Result<()> {
        assert!(recv.len() == send.len() && send.len().is_multiple_of(self.size), "checked by Comm");
        self.in_pieces(element, send.len() / self.size / element.size(), limit, |offset, _, piece| {
            let at = offset * element.size();
            // SAFETY: block r of the type lies at r times the stride and ends within `send` and within `recv`. MPI does
            // not keep the pointers, and the borrow checker keeps the slices apart.
            let code = unsafe {
                let from = send.as_ptr().add(at).cast::<c_void>();
                let into = recv.as_mut_ptr().add(at).cast::<c_void>();
                let (block, blocks) = (piece.datatype, piece.count);
                ffi::MPI_Alltoall(from, blocks, block, into, blocks, block, self.comm)
            };
            check("MPI_Alltoall", code)
        })
    }

    /// Cuts `len` elements a rank into pieces of which those of all ranks together fit in `limit`, and calls
    /// `move_piece(offset, elements, blocks)` for each.
    fn in_pieces(
        &self,
        element: Element,
        len: usize,
        limit: usize,
        mut move_piece: impl FnMut(usize, usize, &Blocks) -> Result<()>,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        if len * self.size <= limit {
            return move_piece(0, len, &Blocks { count: int(len), datatype: element.datatype(), own: false });
        }
        let piece = (limit / self.size).max(1);
        let mut blocks = Blocks::strided(element, piece, len)?;
        for offset in (0..len).step_by(piece) {
            let count = piece.min(len - offset);
            if count < piece {
                blocks = Blocks::strided(element, count, len)?;
            }
            move_piece(offset, count, &blocks)?;
        }
        Ok(())
    }

    /// Everybody's bytes, rank r's `lens[r]` long.
    pub(super) fn gather(&self, mine: &[u8], lens: &[usize], limit: usize) -> Result<Vec<Vec<u8>>> {
        assert!(lens.len() == self.size && lens[self.rank] == mine.len(), "headers carry the lengths");
        let total = lens.iter().try_fold(0usize, |sum, len| sum.checked_add(*len));
        if total == Some(0) {
            return Ok(vec![Vec::new(); self.size]);
        }
        if total.is_none_or(|total| total > limit) {
            return self.gather_one_by_one(mine, lens, limit);
        }
        let counts: Vec<c_int> = lens.iter().map(|len| int(*len)).collect();
        let starts: Vec<c_int> = counts.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + *n))).collect();
        let mut all = vec![0u8; lens.iter().sum()];
        let bytes = Element::Byte.datatype();
        // An empty slice may point to address 1, which is Open MPI's MPI_IN_PLACE: give an address of our own.
        static NOTHING: [u8; 1] = [0];
        let mine = if mine.is_empty() { &NOTHING[..0] } else { mine };
        // SAFETY: `mine` holds counts[rank] bytes, and start + count of every rank lie within `all`.
        let code = unsafe {
            let (from, count) = (mine.as_ptr().cast::<c_void>(), int(mine.len()));
            let into = all.as_mut_ptr().cast::<c_void>();
            ffi::MPI_Allgatherv(from, count, bytes, into, counts.as_ptr(), starts.as_ptr(), bytes, self.comm)
        };
        check("MPI_Allgatherv", code)?;
        let mut rest = all.as_slice();
        Ok(lens.iter().map(|len| rest.split_off(..*len).unwrap_or_default().to_vec()).collect())
    }

    fn gather_one_by_one(&self, mine: &[u8], lens: &[usize], limit: usize) -> Result<Vec<Vec<u8>>> {
        let one = |(root, len): (usize, &usize)| {
            let mut bytes = if root == self.rank { mine.to_vec() } else { vec![0; *len] };
            self.broadcast(root, &mut bytes, limit)?;
            Ok(bytes)
        };
        lens.iter().enumerate().map(one).collect()
    }

    /// `bytes` becomes what it is on `root`, in messages of at most `limit` bytes. Its length is the same everywhere.
    pub(super) fn broadcast(&self, root: usize, bytes: &mut [u8], limit: usize) -> Result<()> {
        for piece in bytes.chunks_mut(limit) {
            // SAFETY: the piece is as long as said and borrowed for the length of the call.
            let code = unsafe {
                let (at, count) = (piece.as_mut_ptr().cast::<c_void>(), int(piece.len()));
                ffi::MPI_Bcast(at, count, Element::Byte.datatype(), int(root), self.comm)
            };
            check("MPI_Bcast", code)?;
        }
        Ok(())
    }
}

fn ptr_request_null() -> ffi::MPI_Request {
    // SAFETY: a constant of the linked MPI library, never written.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// How one rank's part of a piece lies in a buffer of all ranks: `count` of a type whose extent is the distance between
/// two ranks' parts divided by `count`. In 64-bit addresses, so that a buffer may have more than 2^31 elements.
struct Blocks {
    count: c_int,
    datatype: ffi::MPI_Datatype,
    /// Whether `datatype` was made here and has to be freed.
    own: bool,
}

impl Blocks {
    /// One block of `count` elements in every `stride`.
    fn strided(element: Element, count: usize, stride: usize) -> Result<Blocks> {
        let mut contiguous = element.datatype();
        // SAFETY: a built-in type and a local for the result.
        let code = unsafe { ffi::MPI_Type_contiguous(int(count), element.datatype(), &mut contiguous) };
        check("MPI_Type_contiguous", code)?;
        let inner = Blocks { count: 1, datatype: contiguous, own: true };
        let mut datatype = contiguous;
        let extent = (stride * element.size()) as ffi::MPI_Aint;
        // SAFETY: the type was made above and is freed when `inner` is dropped, which MPI allows while others use it.
        let code = unsafe { ffi::MPI_Type_create_resized(inner.datatype, 0, extent, &mut datatype) };
        check("MPI_Type_create_resized", code)?;
        let mut blocks = Blocks { count: 1, datatype, own: true };
        // SAFETY: a type made above and not yet committed.
        check("MPI_Type_commit", unsafe { ffi::MPI_Type_commit(&mut blocks.datatype) })?;
        Ok(blocks)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: a type made by `strided` and freed once. A failure leaks a few bytes and is not worth more.
            unsafe { ffi::MPI_Type_free(&mut self.datatype) };
        }
    }
}
