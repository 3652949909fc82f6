//! The hash against its definition, what it must notice and what it must not.

use super::*;
use crate::backend::cpu::testing::{buffer, normal, same_on_threads};
use crate::rng::tensor_key;
use crate::{Buffer, DType, Device};
use proptest::prelude::*;
use std::ops::Range;

const SALT: u64 = 7;

fn piece(range: Range<usize>, tensor: &str, first_index: u64) -> Piece {
    Piece { range, tensor: tensor_key(tensor), first_index, decay: false }
}

/// The hash of a buffer, whatever the number of threads.
fn hash(x: &Buffer, pieces: &[Piece], salt: u64) -> u64 {
    same_on_threads(|threads| {
        let mut sum = 0;
        state_hash(threads, StateHash { x: x.view(), pieces, salt, sum: &mut sum }).unwrap();
        sum
    })
}

/// The hash of one parameter, "w", that lies alone in a buffer.
fn hash_of(x: &[f32]) -> u64 {
    hash(&buffer(DType::F32, x), &[piece(0..x.len(), "w", 0)], SALT)
}

/// The definition, element by element.
fn reference(x: &Buffer, pieces: &[Piece], salt: u64) -> u64 {
    let mut sum = 0u64;
    for p in pieces {
        for (i, at) in p.range.clone().enumerate() {
            let bits = x.view().get(at).to_bits() as u64;
            let index = p.first_index + i as u64;
            sum = sum.wrapping_add(mix(mix(mix(salt) ^ p.tensor) ^ index.rotate_left(32) ^ bits));
        }
    }
    sum
}

#[test]
fn known_answers() {
    // Computed from the definition with whole numbers of any length in Python.
    assert_eq!(hash_of(&[1.0, -2.5, 0.0]), 0x6a73_0aeb_99c5_6586);
    let x = buffer(DType::Bf16, &[9.0, 1.0, -2.5, 0.0]);
    assert_eq!(hash(&x, &[piece(1..4, "w", 0)], SALT), 0x6a73_0aeb_99c5_6586);
    assert_eq!(hash(&x, &[piece(1..4, "w", 1 << 33)], 0), 0x6079_5eba_8982_1d6a);
    assert_eq!(hash(&x, &[], SALT), 0);
}

#[test]
fn every_size_and_dtype_is_the_definition() {
    for dtype in [DType::F32, DType::Bf16] {
        for n in [0, 1, 7, 16, 33, 4097, 100_000] {
            let x = buffer(dtype, &normal("x", n));
            // A gap at the start, one between the pieces, and padding at the end.
            let pieces = [piece(n / 9..n / 3, "a", 5), piece(n / 2..n - n / 10, "b", 1 << 31)];
            assert_eq!(hash(&x, &pieces, SALT), reference(&x, &pieces, SALT), "{dtype} {n}");
        }
    }
}

#[test]
fn a_sum_is_added_to_and_wraps() {
    let threads = Threads::new(2).unwrap();
    let x = buffer(DType::F32, &normal("x", 100_000));
    let (whole, start) = ([piece(0..100_000, "w", 0)], u64::MAX - 1);
    let mut sum = start;
    state_hash(&threads, StateHash { x: x.view(), pieces: &whole, salt: SALT, sum: &mut sum }).unwrap();
    assert_eq!(sum, start.wrapping_add(hash(&x, &whole, SALT)));
}

#[test]
fn bf16_hashes_like_the_same_numbers_in_fp32() {
    let values = normal("x", 5000);
    let narrow = buffer(DType::Bf16, &values);
    let wide = buffer(DType::F32, &narrow.view().to_f32());
    let whole = [piece(0..5000, "w", 0)];
    assert_eq!(hash(&narrow, &whole, SALT), hash(&wide, &whole, SALT));
    assert_ne!(hash(&wide, &whole, SALT), hash_of(&values), "rounding is a change");
}

#[test]
fn padding_does_not_count() {
    let pieces = [piece(0..10, "w", 0)];
    let mut x = buffer(DType::F32, &normal("x", 20));
    let before = hash(&x, &pieces, SALT);
    x.view_mut().slice(10..20).copy_from_f32(&[f32::NAN; 10]);
    assert_eq!(hash(&x, &pieces, SALT), before);
}

#[test]
fn every_bit_of_every_element_counts() {
    let x = normal("x", 40);
    let before = hash_of(&x);
    for i in 0..x.len() {
        for bit in 0..32 {
            let mut changed = x.clone();
            changed[i] = f32::from_bits(x[i].to_bits() ^ 1 << bit);
            assert_ne!(hash_of(&changed), before, "bit {bit} of element {i}");
        }
    }
    assert_ne!(
        hash_of(&[0.0; 40]),
        hash_of(&{
            let mut x = [0.0; 40];
            x[17] = -0.0;
            x
        })
    );
    assert_ne!(hash_of(&[f32::NAN]), hash_of(&[-f32::NAN]));
}

#[test]
fn places_tensors_and_salts_count() {
    let x = buffer(DType::F32, &normal("x", 100));
    let (a, b) = (0..50, 50..100);
    let of = |pieces: [Piece; 2], salt| hash(&x, &pieces, salt);
    let all = [
        of([piece(a.clone(), "a", 0), piece(b.clone(), "b", 0)], SALT),
        of([piece(a.clone(), "b", 0), piece(b.clone(), "a", 0)], SALT),
        of([piece(a.clone(), "a", 0), piece(b.clone(), "c", 0)], SALT),
        of([piece(a.clone(), "a", 1), piece(b.clone(), "b", 0)], SALT),
        of([piece(a.clone(), "a", 1 << 32), piece(b.clone(), "b", 0)], SALT),
        of([piece(a.clone(), "a", 0), piece(b.clone(), "b", 0)], SALT + 1),
        of([piece(a, "a", 0), piece(b, "a", 50)], SALT),
    ];
    for (i, x) in all.iter().enumerate() {
        assert!(!all[..i].contains(x), "case {i}");
    }
}

/// Equal elements must neither cancel (as under exclusive-or) nor be told apart by their number alone.
#[test]
fn constant_tensors_differ_by_value_and_length() {
    let sums: Vec<u64> =
        [0.0f32, -0.0, 1.0].iter().flat_map(|x| [1, 2, 3, 64].map(|n| hash_of(&vec![*x; n]))).collect();
    for (i, x) in sums.iter().enumerate() {
        assert!(*x != 0 && !sums[..i].contains(x), "case {i}");
    }
}

/// One bit of value or index flips each bit of the term with probability 1/2: over `n` inputs a mean of 32 with a standard
/// error of 4/√n. The bound is five of them, for 64 input bits.
#[test]
fn terms_avalanche() {
    let n = 4000;
    let term = |i: u32, bits: u32| hash_run(&[f32::from_bits(bits)], mix(3), i as u64);
    for bit in 0..64 {
        let flips = |i: u32| {
            // Small indices and numbers near one, as in a model: the random part of the input is small.
            let bits = 1.0f32.to_bits() + i % 61;
            let (index, value) = if bit < 32 { (i, bits ^ 1 << bit) } else { (i ^ 1 << (bit - 32), bits) };
            (term(i, bits) ^ term(index, value)).count_ones()
        };
        let mean = (0..n).map(flips).sum::<u32>() as f64 / n as f64;
        assert!((mean - 32.0).abs() < 5.0 * 4.0 / (n as f64).sqrt(), "bit {bit}: {mean}");
    }
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let device = Device::cpu(1).unwrap();
    let x = buffer(DType::F32, &[1.0; 10]);
    let refused =
        |pieces: &[Piece]| device.state_hash(StateHash { x: x.view(), pieces, salt: 0, sum: &mut 0 }).is_err();
    assert!(!refused(&[piece(0..4, "a", 0), piece(4..10, "b", 0)]));
    assert!(refused(&[piece(0..5, "a", 0), piece(4..10, "b", 0)]), "overlap");
    assert!(refused(&[piece(4..10, "a", 0), piece(0..4, "b", 0)]), "order");
    assert!(refused(&[piece(0..11, "a", 0)]), "beyond the end");
    #[expect(clippy::reversed_empty_ranges, reason = "the point of the test")]
    let reversed = piece(5..4, "a", 0);
    assert!(refused(&[reversed]), "reversed");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Cut into any pieces, and into parts that are hashed one after another, the sum is the whole's.
    #[test]
    fn cuts_change_nothing(n in 1usize..70_000, cuts in prop::collection::vec(0usize..70_000, 0..9), part in 0usize..70_000) {
        let x = buffer(DType::Bf16, &normal("x", n));
        let whole = hash(&x, &[piece(0..n, "w", 0)], SALT);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at % n).chain([0, n]).collect();
        cuts.sort_unstable();
        let pieces: Vec<Piece> = cuts.windows(2).map(|c| piece(c[0]..c[1], "w", c[0] as u64)).collect();
        prop_assert_eq!(hash(&x, &pieces, SALT), whole);
        let at = part % n;
        let sum = |range: Range<usize>| {
            let x = buffer(DType::Bf16, &x.view().slice(range.clone()).to_f32());
            hash(&x, &[piece(0..range.len(), "w", range.start as u64)], SALT)
        };
        prop_assert_eq!(sum(0..at).wrapping_add(sum(at..n)), whole);
    }

    /// Two different elements swapped.
    #[test]
    fn a_swap_counts(n in 2usize..3000, i in 0usize..3000, j in 0usize..3000) {
        let mut x = normal("x", n);
        let (i, j, before) = (i % n, j % n, hash_of(&x));
        prop_assume!(x[i].to_bits() != x[j].to_bits());
        x.swap(i, j);
        prop_assert_ne!(hash_of(&x), before);
    }
}
