//! What a transport owes, and the header that says which call a rank is in.

use crate::oneshot::Receiver;
use crate::{Error, Group, Result};
use spmd_core::{Buffer, DType};
use std::time::Duration;

/// Moves data between ranks. Arguments were checked by [`crate::Comm`]; what is left to a transport is to compare the
/// ranks' headers before it moves anything ([`agree`]).
pub(crate) trait Transport: Send + Sync {
    fn rank(&self) -> usize;
    fn world(&self) -> usize;
    fn name(&self) -> &'static str;

    /// Starts a call and returns at once. Calls complete in the order in which they were started. `limit` is how long
    /// the transport may wait for other ranks. Every rank of the world comes to every call; the data moves within the
    /// groups that the header names.
    fn start(&self, header: Header, work: Work, limit: Duration) -> Receiver;

    /// Ranks that have not come to call `seq`, as far as is known.
    fn missing(&self, seq: u64) -> Vec<usize>;

    /// How much longer than its limit a caller waits. A transport that watches the limit itself knows more about what
    /// is missing than its caller, so it gets the time to say so.
    fn grace(&self) -> Duration {
        Duration::ZERO
    }
}

/// What goes into a call; the header's kind says what is done with it.
pub(crate) enum Work {
    /// Send and receive buffer of [`Kind::AllGather`] and [`Kind::Exchange`].
    Buffers(Buffer, Buffer),
    /// What this rank contributes to one of the other calls (nothing: empty).
    Bytes(Vec<u8>),
}

/// What comes out of a call.
pub(crate) enum Outcome {
    /// The buffers of [`Work::Buffers`], the second filled.
    Buffers(Buffer, Buffer),
    /// One part a rank of the group for gathers, one part for a broadcast, none for a barrier.
    Parts(Vec<Vec<u8>>),
}

/// The operations ranks can meet in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    AllGather,
    Exchange,
    GatherF64,
    GatherU64,
    GatherBytes,
    Broadcast,
    Barrier,
    Finish,
}

impl Kind {
    #[cfg(any(test, feature = "mpi"))]
    const ALL: [Kind; 8] = [
        Kind::AllGather,
        Kind::Exchange,
        Kind::GatherF64,
        Kind::GatherU64,
        Kind::GatherBytes,
        Kind::Broadcast,
        Kind::Barrier,
        Kind::Finish,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::AllGather => "all_gather",
            Kind::Exchange => "exchange",
            Kind::GatherF64 => "gather_f64",
            Kind::GatherU64 => "gather_u64",
            Kind::GatherBytes => "gather_bytes",
            Kind::Broadcast => "broadcast_bytes",
            Kind::Barrier => "barrier",
            Kind::Finish => "finish",
        }
    }

    /// Whether every rank has to come with the same length.
    fn same_length(self) -> bool {
        !matches!(self, Kind::GatherBytes | Kind::Broadcast)
    }
}

/// Which call a rank is in. Ranks whose headers do not agree would wait for each other for ever, or move bytes to the
/// wrong place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Number of the call, from 0.
    pub(crate) seq: u64,
    /// What this rank sends: elements for a call on buffers or numbers, bytes for the others.
    pub(crate) len: u64,
    /// Largest number of elements in one message.
    pub(crate) split: u64,
    /// The place in its group of a broadcast's sending rank, otherwise 0.
    pub(crate) root: u32,
    pub(crate) kind: Kind,
    pub(crate) group: Group,
    pub(crate) dtype: Option<DType>,
}

/// Bytes of a header on the wire.
#[cfg(feature = "mpi")]
pub(crate) const HEADER_BYTES: usize = 40;

impl Header {
    /// The call in words, for error messages.
    pub(crate) fn describe(&self) -> String {
        let (name, len) = (self.kind.name(), self.len);
        let what = match (self.kind, self.dtype) {
            (_, Some(dtype)) => format!("{name} sending {len} {dtype} elements"),
            (Kind::GatherF64 | Kind::GatherU64, _) => format!("{name} of {len} numbers"),
            (Kind::Broadcast, _) if self.group == Group::World => format!("{name} from rank {}", self.root),
            (Kind::Broadcast, _) => format!("{name} from member {}", self.root),
            _ => name.to_owned(),
        };
        match self.group {
            Group::World => format!("{what} (call {})", self.seq),
            group => format!("{what} in {group} (call {})", self.seq),
        }
    }

    #[cfg(feature = "mpi")]
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&self.seq.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.split.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.root.to_le_bytes());
        let (group, n) = match self.group {
            Group::World => (0, 0),
            Group::Contiguous(n) => (1, n),
            Group::Strided(n) => (2, n),
        };
        bytes[28..32].copy_from_slice(&(n as u32).to_le_bytes());
        bytes[32] = self.kind as u8;
        bytes[33] = match self.dtype {
            None => 0,
            Some(DType::F32) => 1,
            Some(DType::Bf16) => 2,
        };
        bytes[34] = group;
        bytes
    }

    /// `None` for bytes that no build of this version writes.
    #[cfg(feature = "mpi")]
    pub(crate) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |acc, b| acc << 8 | u64::from(*b));
        let kind = Kind::ALL.into_iter().find(|k| *k as u8 == bytes[32])?;
        let dtype = match bytes[33] {
            0 => None,
            1 => Some(DType::F32),
            2 => Some(DType::Bf16),
            _ => return None,
        };
        let n = (word(24) >> 32) as usize;
        let group = match bytes[34] {
            0 => Group::World,
            1 => Group::Contiguous(n),
            2 => Group::Strided(n),
            _ => return None,
        };
        Some(Header { seq: word(0), len: word(8), split: word(16), root: word(24) as u32, kind, group, dtype })
    }

    fn same_call(&self, other: &Header) -> bool {
        let comparable = |h: &Header| Header { len: if h.kind.same_length() { h.len } else { 0 }, ..*h };
        comparable(self) == comparable(other)
    }
}

/// Whether all ranks (in rank order) are in the same call.
pub(crate) fn agree(headers: &[Header]) -> Result<()> {
    match headers {
        [first, rest @ ..] if rest.iter().any(|h| !h.same_call(first)) => {
            let mut asked: Vec<String> = headers.iter().map(Header::describe).collect();
            if rest.iter().any(|h| h.split != first.split) {
                asked
                    .iter_mut()
                    .zip(headers)
                    .for_each(|(a, h)| a.push_str(&format!(", messages split at {}", h.split)));
            }
            Err(Error::Mismatch { asked })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: Kind) -> Header {
        let (group, dtype) = (Group::Strided(4), Some(DType::Bf16));
        Header { seq: 7, len: u64::MAX - 3, split: 1 << 28, root: 5, kind, group, dtype }
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn headers_survive_the_wire() {
        for kind in Kind::ALL {
            for dtype in [None, Some(DType::F32), Some(DType::Bf16)] {
                for group in [Group::World, Group::Contiguous(3), Group::Strided(u32::MAX as usize)] {
                    let header = Header { dtype, group, ..header(kind) };
                    assert_eq!(Header::from_bytes(&header.to_bytes()), Some(header));
                }
            }
        }
        assert_eq!(Header::from_bytes(&[0xff; HEADER_BYTES]), None);
    }

    #[test]
    fn every_field_that_must_agree_is_compared() {
        let a = header(Kind::AllGather);
        let others = [
            Header { seq: 8, ..a },
            Header { len: 1, ..a },
            Header { split: 1, ..a },
            Header { kind: Kind::Exchange, ..a },
            Header { dtype: Some(DType::F32), ..a },
            Header { group: Group::Strided(2), ..a },
            Header { group: Group::Contiguous(4), ..a },
            Header { group: Group::World, ..a },
        ];
        assert_eq!(agree(&[a, a, a]), Ok(()));
        let broadcast = Header { kind: Kind::Broadcast, dtype: None, ..a };
        let pairs = others.map(|other| (a, other)).into_iter().chain([(broadcast, Header { root: 1, ..broadcast })]);
        for (a, other) in pairs {
            assert!(
                matches!(agree(&[a, other]), Err(Error::Mismatch { asked }) if asked.len() == 2 && asked[0] != asked[1])
            );
        }
    }

    #[test]
    fn lengths_may_differ_only_where_the_call_allows_it() {
        for kind in Kind::ALL {
            let (a, b) = (header(kind), Header { len: 4, ..header(kind) });
            assert_eq!(agree(&[a, b]).is_ok(), matches!(kind, Kind::GatherBytes | Kind::Broadcast));
        }
    }
}
