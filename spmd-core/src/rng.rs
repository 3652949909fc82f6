//! Counter-based randomness: every number is a pure function of (seed, purpose, tensor, step, global index), so nothing
//! depends on the number of ranks, threads or steps taken before.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

/// What a stream of numbers is for; two purposes never share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Purpose {
    /// Initial weights.
    Init = 1,
    /// The order of rows in an epoch.
    Shuffle = 2,
    /// Stochastic rounding of the shadow.
    RoundShadow = 3,
    /// Stochastic rounding of exp_avg.
    RoundExpAvg = 4,
    /// Stochastic rounding of exp_avg_sq.
    RoundExpAvgSq = 5,
    /// Sampling of generated tokens.
    Sample = 6,
}

/// One stream: a key made of seed, purpose and tensor, and a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    step: [u32; 2],
}

impl Stream {
    /// The stream of this seed, purpose, tensor (see [`tensor_key`]; 0 where there is none) and step.
    pub fn new(seed: u64, purpose: Purpose, tensor: u64, step: u64) -> Self {
        let key = mix(mix(mix(seed) ^ purpose as u64) ^ tensor);
        Stream { key: halves(key), step: halves(step) }
    }

    /// The four words of counter `block`.
    #[inline(always)]
    pub fn block(&self, block: u64) -> [u32; 4] {
        let [lo, hi] = halves(block);
        philox([lo, hi, self.step[0], self.step[1]], self.key)
    }

    /// Word `index`: word `index % 4` of block `index / 4`.
    #[inline(always)]
    pub fn u32(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// The blocks from `first_block` on: [`Stream::block`] of each, in a loop that runs on vectors.
    #[inline(always)]
    pub(crate) fn fill(&self, first_block: u64, blocks: &mut [[u32; 4]]) {
        for (i, out) in blocks.iter_mut().enumerate() {
            *out = self.block(first_block + i as u64);
        }
    }

    /// A number in [0, 1) with 53 random bits, from the first two words of block `index`.
    pub fn f64(&self, index: u64) -> f64 {
        let [a, b, ..] = self.block(index);
        let bits = ((a as u64) << 21) ^ ((b as u64) >> 11);
        bits as f64 / (1u64 << 53) as f64
    }

    /// A standard normal number: Box-Muller on block `index`, in f64.
    pub fn normal(&self, index: u64) -> f64 {
        let [a, b, c, d] = self.block(index);
        let unit = |hi: u32, lo: u32| (((hi as u64) << 21 ^ (lo as u64) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        (-2.0 * unit(a, b).ln()).sqrt() * (std::f64::consts::TAU * unit(c, d)).cos()
    }

    /// A number below `n` (Lemire's multiply-shift on 64 random bits; the bias is below n/2⁶⁴).
    pub fn below(&self, index: u64, n: u64) -> u64 {
        let [a, b, ..] = self.block(index);
        let word = (a as u64) << 32 | b as u64;
        ((word as u128 * n as u128) >> 64) as u64
    }
}

/// A tensor's identity as a key: FNV-1a of its name.
pub fn tensor_key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ b as u64).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Philox4x32 with ten rounds.
#[inline(always)]
pub fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = 0xD251_1F53_u64 * c[0] as u64;
        let p1 = 0xCD9E_8D57_u64 * c[2] as u64;
        c = [(p1 >> 32) as u32 ^ c[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// `x` rounded to one of its two bf16 neighbours, away from zero with the probability of its distance from the
/// nearer-to- zero one in units of their gap: the low 16 bits of `random`, uniform, are added below the bf16 mantissa
/// and the sum is truncated. A value bf16 holds exactly stays itself, ±∞ and NaN stay what they are, and the sign
/// never changes. A finite value beyond the largest bf16 may become ±∞ of its sign, as nearest rounding has it too.
#[inline(always)]
pub fn stochastic_bf16(x: f32, random: u32) -> f32 {
    let bits = x.to_bits();
    // The largest finite pattern is 0x7f7f_ffff: adding 0xffff carries at most into 0x7f80_0000, never into the sign.
    let rounded = bits.wrapping_add(random & 0xffff) & 0xffff_0000;
    let kept = if x.is_nan() { (bits | 0x0040_0000) & 0xffff_0000 } else { bits };
    f32::from_bits(if x.is_finite() { rounded } else { kept })
}

/// The finaliser of SplitMix64 after one step: a bijection that spreads every bit.
#[inline(always)]
pub fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[inline(always)]
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of Random123's kat_vectors for philox4x32 with 10 rounds.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn filled_blocks_are_the_single_blocks() {
        let s = Stream::new(11, Purpose::RoundShadow, tensor_key("w"), 3);
        // Across a carry into the high word of the counter, and a number of blocks that no vector width divides.
        for first in [0, 5, (1 << 32) - 7] {
            let mut blocks = [[0; 4]; 35];
            s.fill(first, &mut blocks);
            for (i, b) in blocks.iter().enumerate() {
                assert_eq!(*b, s.block(first + i as u64));
            }
        }
    }

    #[test]
    fn stochastic_rounding_keeps_exact_values_and_takes_neighbours() {
        for high in 0..=u16::MAX {
            let exact = f32::from_bits((high as u32) << 16);
            for random in [0, 1, 0x8000, 0xffff, u32::MAX] {
                let kept = stochastic_bf16(exact, random);
                assert!(kept.to_bits() == exact.to_bits() || (exact.is_nan() && kept.is_nan()), "{exact:?}");
            }
            if !exact.is_finite() {
                continue;
            }
            let (down, up) = ((high as u32) << 16, (high as u32 + 1) << 16);
            for low in [1u32, 0x7fff, 0x8000, 0xffff] {
                let x = f32::from_bits(down | low);
                // Up exactly when low + random carries: for `low` of the 65,536 random values.
                assert_eq!(stochastic_bf16(x, 0xffff - low).to_bits(), down);
                assert_eq!(stochastic_bf16(x, 0x1_0000 - low).to_bits(), up);
                assert_eq!(stochastic_bf16(x, 0xabcd_0000).to_bits(), down);
                assert_eq!(stochastic_bf16(x, 0xffff).to_bits(), up);
            }
        }
        assert!(stochastic_bf16(f32::from_bits(0x7f80_0001), 0xffff).is_nan());
        assert_eq!(stochastic_bf16(f32::MAX, 0xffff), f32::INFINITY);
        assert_eq!(stochastic_bf16(f32::MIN, 0xffff), f32::NEG_INFINITY);
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        let n = 20_000;
        for (i, x) in [1.001f32, -0.37, 3.3e-5, -1234.5].into_iter().enumerate() {
            let gap = (stochastic_bf16(x, 0xffff) - stochastic_bf16(x, 0)).abs() as f64;
            let draw = |seed| stochastic_bf16(x, Stream::new(seed, Purpose::RoundShadow, i as u64, 1).u32(9)) as f64;
            let mean = (0..n).map(draw).sum::<f64>() / n as f64;
            // One draw has standard deviation at most gap/2; four standard errors of the mean.
            assert!((mean - x as f64).abs() < 4.0 * gap / 2.0 / (n as f64).sqrt(), "{x}: {mean}");
        }
    }

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let s = Stream::new(7, Purpose::Init, tensor_key("x"), 0);
        let n = 200_000;
        let (mut sum, mut sq) = (0.0, 0.0);
        for i in 0..n {
            let x = s.normal(i);
            sum += x;
            sq += x * x;
        }
        // Four standard errors: 4/sqrt(n) for the mean, 4*sqrt(2/n) for the variance.
        assert!((sum / n as f64).abs() < 4.0 / (n as f64).sqrt());
        assert!((sq / n as f64 - 1.0).abs() < 4.0 * (2.0 / n as f64).sqrt());
    }
}
