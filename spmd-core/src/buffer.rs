//! Owned memory that knows its dtype and length, and the views that kernels take.
//!
//! A [`Buffer`] is flat; shapes live in the operation's arguments. [`View`] and [`ViewMut`] are enums over the dtype, so
//! a kernel's length always comes from the slice it was given, never from a second argument. A device backend adds one
//! variant here.

use crate::dtype::Element;
use crate::{DType, Error, Result};
use half::bf16;
use memmap2::{Advice, MmapMut};
use std::ops::Range;

/// Flat, owned, zero-initialised memory of one dtype, page-aligned and on huge pages where the system grants them.
#[derive(Debug)]
pub struct Buffer {
    memory: MmapMut,
    dtype: DType,
    len: usize,
}

impl Buffer {
    /// `len` zeros. Pages are touched lazily: memory is resident once written.
    ///
    /// # Errors
    /// [`Error::Memory`] when the system refuses.
    pub fn zeros(dtype: DType, len: usize, what: &'static str) -> Result<Self> {
        let bytes = len.checked_mul(dtype.size()).filter(|b| *b <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::Memory { bytes: usize::MAX, what, reason: "too large".to_owned() })?;
        let memory =
            MmapMut::map_anon(bytes.max(1)).map_err(|e| Error::Memory { bytes, what, reason: e.to_string() })?;
        if bytes >= HUGE_PAGE {
            // Only a wish: a kernel without transparent huge pages answers with an error and normal pages serve as well.
            let _ = memory.advise(Advice::HugePage);
        }
        Ok(Buffer { memory, dtype, len })
    }

    /// A buffer holding these numbers, rounded to `dtype`.
    ///
    /// # Errors
    /// [`Error::Memory`] when the system refuses.
    pub fn from_f32(dtype: DType, values: &[f32], what: &'static str) -> Result<Self> {
        let mut buffer = Buffer::zeros(dtype, values.len(), what)?;
        buffer.view_mut().copy_from_f32(values);
        Ok(buffer)
    }

    /// Bytes that were asked of the system, whatever part of them is in use.
    pub fn allocated(&self) -> usize {
        // Nothing at all cannot be mapped, so an empty buffer has one byte, which no dtype fits in.
        if self.memory.len() == 1 { 0 } else { self.memory.len() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of the elements.
    pub fn size(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// The whole buffer, to read.
    pub fn view(&self) -> View<'_> {
        let bytes = &self.memory[..self.len * self.dtype.size()];
        match self.dtype {
            DType::F32 => View::F32(bytemuck::cast_slice(bytes)),
            DType::Bf16 => View::Bf16(bytemuck::cast_slice(bytes)),
        }
    }

    /// The whole buffer, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let bytes = &mut self.memory[..self.len * self.dtype.size()];
        match self.dtype {
            DType::F32 => ViewMut::F32(bytemuck::cast_slice_mut(bytes)),
            DType::Bf16 => ViewMut::Bf16(bytemuck::cast_slice_mut(bytes)),
        }
    }

    /// The elements' bytes, for a transport or a file.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[..self.len * self.dtype.size()]
    }

    /// The elements' bytes, to fill from a transport or a file.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let n = self.len * self.dtype.size();
        &mut self.memory[..n]
    }

    /// Makes the buffer `len` elements of `dtype` long within the memory it already owns, contents unspecified. It
    /// allocates only when that memory is too small, so one buffer can serve units of several sizes.
    ///
    /// # Errors
    /// [`Error::Memory`] when it has to grow and the system refuses.
    pub fn resize(&mut self, dtype: DType, len: usize, what: &'static str) -> Result<()> {
        if len * dtype.size() > self.memory.len() {
            *self = Buffer::zeros(dtype, len, what)?;
        }
        (self.dtype, self.len) = (dtype, len);
        Ok(())
    }
}

/// From this size on huge pages are asked for.
const HUGE_PAGE: usize = 2 << 20;

/// Elements to read.
#[derive(Debug, Clone, Copy)]
pub enum View<'a> {
    /// fp32 elements.
    F32(&'a [f32]),
    /// bf16 elements.
    Bf16(&'a [bf16]),
}

/// Elements to write.
#[derive(Debug)]
pub enum ViewMut<'a> {
    /// fp32 elements.
    F32(&'a mut [f32]),
    /// bf16 elements.
    Bf16(&'a mut [bf16]),
}

/// Runs the same expression on the slice of either dtype.
#[macro_export]
macro_rules! each_dtype {
    ($view:expr, $slice:ident => $body:expr) => {
        match $view {
            $crate::buffer::View::F32($slice) => $body,
            $crate::buffer::View::Bf16($slice) => $body,
        }
    };
    (mut $view:expr, $slice:ident => $body:expr) => {
        match $view {
            $crate::buffer::ViewMut::F32($slice) => $body,
            $crate::buffer::ViewMut::Bf16($slice) => $body,
        }
    };
}

impl<'a> View<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each_dtype!(self, s => s.len())
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            View::F32(_) => DType::F32,
            View::Bf16(_) => DType::Bf16,
        }
    }

    /// The part `range`; panics like slicing if it lies outside, which is our own mistake.
    pub fn slice(&self, range: Range<usize>) -> View<'a> {
        match self {
            View::F32(s) => View::F32(&s[range]),
            View::Bf16(s) => View::Bf16(&s[range]),
        }
    }

    /// Element `i`, widened.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            View::F32(s) => s[i],
            View::Bf16(s) => crate::dtype::from_bf16(s[i]),
        }
    }

    /// All elements, widened. For tests and small things: it allocates.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            View::F32(s) => s.to_vec(),
            View::Bf16(s) => s.iter().map(|x| crate::dtype::from_bf16(*x)).collect(),
        }
    }

    /// The elements' bytes.
    pub fn bytes(&self) -> &'a [u8] {
        each_dtype!(self, s => bytemuck::cast_slice(s))
    }

    /// The slice as elements of `E`, or an error naming the operation and argument if the dtype is another.
    ///
    /// # Errors
    /// [`Error::DType`].
    pub fn typed<E: Element>(&self, op: &'static str, what: &'static str) -> Result<&'a [E]> {
        if self.dtype() != E::DTYPE {
            return Err(Error::DType { op, what, expected: E::DTYPE.name().to_owned(), found: self.dtype() });
        }
        Ok(each_dtype!(self, s => bytemuck::cast_slice(s)))
    }

    /// The fp32 slice, or an error naming the operation and argument.
    pub fn f32(&self, op: &'static str, what: &'static str) -> Result<&'a [f32]> {
        match self {
            View::F32(s) => Ok(s),
            View::Bf16(_) => Err(Error::DType { op, what, expected: "fp32".to_owned(), found: DType::Bf16 }),
        }
    }
}

impl<'a> ViewMut<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each_dtype!(mut self, s => s.len())
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            ViewMut::F32(_) => DType::F32,
            ViewMut::Bf16(_) => DType::Bf16,
        }
    }

    /// A shorter borrow of the same elements.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        match self {
            ViewMut::F32(s) => ViewMut::F32(s),
            ViewMut::Bf16(s) => ViewMut::Bf16(s),
        }
    }

    /// The same elements, to read.
    pub fn as_view(&self) -> View<'_> {
        match self {
            ViewMut::F32(s) => View::F32(s),
            ViewMut::Bf16(s) => View::Bf16(s),
        }
    }

    /// The part `range` of this view, consuming it; panics like slicing if it lies outside.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a> {
        match self {
            ViewMut::F32(s) => ViewMut::F32(&mut s[range]),
            ViewMut::Bf16(s) => ViewMut::Bf16(&mut s[range]),
        }
    }

    /// Two disjoint parts, cut at `at`.
    pub fn split_at(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        match self {
            ViewMut::F32(s) => {
                let (a, b) = s.split_at_mut(at);
                (ViewMut::F32(a), ViewMut::F32(b))
            }
            ViewMut::Bf16(s) => {
                let (a, b) = s.split_at_mut(at);
                (ViewMut::Bf16(a), ViewMut::Bf16(b))
            }
        }
    }

    /// Writes these numbers, rounded once. Lengths must be equal.
    pub fn copy_from_f32(&mut self, values: &[f32]) {
        match self {
            ViewMut::F32(s) => s.copy_from_slice(values),
            ViewMut::Bf16(s) => {
                assert_eq!(s.len(), values.len(), "copy_from_f32 between different lengths");
                s.iter_mut().zip(values).for_each(|(d, x)| *d = crate::dtype::to_bf16(*x));
            }
        }
    }

    /// Sets every element to zero.
    pub fn zero(&mut self) {
        match self {
            ViewMut::F32(s) => s.fill(0.0),
            ViewMut::Bf16(s) => s.fill(bf16::ZERO),
        }
    }

    /// The slice as elements of `E`, or an error naming the operation and argument if the dtype is another.
    ///
    /// # Errors
    /// [`Error::DType`].
    pub fn typed<E: Element>(self, op: &'static str, what: &'static str) -> Result<&'a mut [E]> {
        if self.dtype() != E::DTYPE {
            return Err(Error::DType { op, what, expected: E::DTYPE.name().to_owned(), found: self.dtype() });
        }
        Ok(each_dtype!(mut self, s => bytemuck::cast_slice_mut(s)))
    }

    /// The fp32 slice, or an error naming the operation and argument.
    pub fn f32(self, op: &'static str, what: &'static str) -> Result<&'a mut [f32]> {
        match self {
            ViewMut::F32(s) => Ok(s),
            ViewMut::Bf16(_) => Err(Error::DType { op, what, expected: "fp32".to_owned(), found: DType::Bf16 }),
        }
    }
}
