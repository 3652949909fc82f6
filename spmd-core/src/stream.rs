//! A copy that does not pass through the caches, for memory that is not read again soon.

/// Copies `from` into `to`. An ordinary copy first fetches the memory it is about to overwrite, unless it is longer than
/// the caches; this one never does, so that a large copy made of many middling ones moves two thirds of the bytes.
///
/// # Panics
/// When the lengths differ.
pub fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy between slices of different lengths");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX, as was asked just now, and the lengths are equal.
        return unsafe { copy_avx(to, from) };
    }
    to.copy_from_slice(from);
}

/// # Safety
/// The processor has AVX; `to` is as long as `from`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_avx(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    // Stores past the caches want whole, aligned lines.
    const LINE: usize = 64;
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (head_to, to) = to.split_at_mut(head);
    let (head_from, from) = from.split_at(head);
    head_to.copy_from_slice(head_from);
    let mut lines_to = to.chunks_exact_mut(LINE);
    let mut lines_from = from.chunks_exact(LINE);
    for (to, from) in lines_to.by_ref().zip(lines_from.by_ref()) {
        let (to, from) = (to.as_mut_ptr().cast::<__m256i>(), from.as_ptr().cast::<__m256i>());
        // SAFETY: both point to LINE = 64 bytes of a chunk, two vectors of 32; `to` is aligned to 64, and loads need no
        // alignment. The slices cannot overlap, because one of them is borrowed mutably.
        unsafe {
            let (a, b) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, a);
            _mm256_stream_si256(to.add(1), b);
        }
    }
    // Streamed stores are weakly ordered; whoever reads the copy in another thread comes after this fence.
    _mm_sfence();
    lines_to.into_remainder().copy_from_slice(lines_from.remainder());
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn any_start_and_any_length() {
        let from: Vec<u8> = (0..1000u32).map(|i| (i * 7 % 251) as u8).collect();
        for start in [0, 1, 31, 63, 64, 65] {
            for len in [0, 1, 63, 64, 65, 127, 128, 900] {
                let mut to = vec![255u8; 1000];
                copy(&mut to[start..start + len], &from[17..17 + len]);
                assert_eq!(to[start..start + len], from[17..17 + len], "start {start}, length {len}");
                assert!(to[..start].iter().chain(&to[start + len..]).all(|b| *b == 255), "start {start}, length {len}");
            }
        }
    }
}
