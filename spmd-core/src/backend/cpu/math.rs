//! The elementary functions kernels share, written so that a loop over them vectorises: no branch, no call, no table.

/// e^x, off by less than one unit in the last place (the test walks the whole range). Overflow is infinity, what lies below half the
/// smallest subnormal is zero, NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2 (Cody and Waite's two-part reduction: 355/512 times any n here is exact), then
/// e^r = 1 + r + r²·P(r). P and the split of ln 2 are those of expf in S. Moshier's Cephes library. Plain products and sums, no fused ones,
/// so every instruction set gives the same bits.
#[inline(always)]
pub(super) fn exp_f32(x: f32) -> f32 {
    const LN2_HI: f32 = 355.0 / 512.0;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // 1.5·2^23: adding it rounds to an integer, which then sits in the low bits.
    const TO_INTEGER: f32 = 12_582_912.0;
    // Comparisons rather than `clamp`/`min`/`max`: a NaN fails both and passes through, in one instruction each.
    let x = if x > 90.0 { 90.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };

    let shifted = x * std::f32::consts::LOG2_E + TO_INTEGER;
    let n = (shifted.to_bits() as i32).wrapping_sub(TO_INTEGER.to_bits() as i32);
    let whole = shifted - TO_INTEGER;
    let r = (x - whole * LN2_HI) - whole * LN2_LO;

    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let e = 1.0 + (r + (r * r) * p);

    // 2^n in two factors, each a normal number, so that the last product rounds once into a subnormal or infinity.
    let half = n >> 1;
    e * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2^n for −126 ≤ n ≤ 127; any other n gives some number (it only happens to a NaN's).
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units of the last place of the exact value; below the normal range one unit is 2^-149.
    fn ulps(x: f32) -> f64 {
        let exact = f64::from(x).exp();
        let exponent = (exact.log2().floor() as i32).max(-126);
        (f64::from(exp_f32(x)) - exact).abs() / f64::powi(2.0, exponent - 23)
    }

    #[test]
    fn exp_is_within_one_unit_in_the_last_place() {
        // Every 97th float from −104 (below the smallest subnormal's half) to 88.72 (largest finite result), both signs.
        let (mut worst, mut at) = (0.0, 0.0);
        for (limit, sign) in [(104.0f32, -1.0f32), (88.72, 1.0)] {
            for bits in (0..limit.to_bits()).step_by(97) {
                let x = sign * f32::from_bits(bits);
                let error = ulps(x);
                if error > worst {
                    (worst, at) = (error, x);
                }
            }
        }
        println!("worst error {worst} ulp at {at}");
        assert!(worst < 1.0, "{worst} ulp at {at}");
    }

    #[test]
    fn exp_at_its_ends() {
        assert_eq!(exp_f32(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp_f32(-0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(1e30), f32::INFINITY);
        assert_eq!(exp_f32(88.73), f32::INFINITY, "e^88.73 is above the largest fp32 number");
        for x in [f32::NEG_INFINITY, -1e30, -104.5] {
            assert_eq!(exp_f32(x).to_bits(), 0, "{x}");
        }
        assert_eq!(exp_f32(-103.5).to_bits(), 1, "the smallest subnormal");
        for x in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            assert!(exp_f32(x).is_nan());
        }
    }
}
