//! Ranges of axes, their ticks, and how numbers are written on them.

use crate::table::number;

/// What a curve's values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Plain numbers.
    Plain,
    /// Shares of 1, shown in percent.
    Share,
    /// Large counts.
    Count,
    /// 2³⁰ bytes.
    Gib,
}

impl Unit {
    /// A value in words, with about five digits.
    pub fn format(self, x: f64) -> String {
        match self {
            Unit::Plain if x != 0.0 && (x.abs() < 1e-3 || x.abs() >= 1e6) => number(rounded(x, 5)),
            Unit::Plain => format!("{x:.4}"),
            Unit::Share => format!("{:.1} %", x * 100.0),
            Unit::Count => thousands(x),
            Unit::Gib => format!("{x:.3} GiB"),
        }
    }

    /// A tick of an axis whose ticks are `step` apart.
    pub(super) fn tick(self, x: f64, step: f64) -> String {
        match self {
            Unit::Share => format!("{}%", decimals(x * 100.0, step * 100.0)),
            _ if x.abs() >= 1e6 => format!("{}M", decimals(x / 1e6, step / 1e6)),
            _ if step >= 1.0 => thousands(x),
            _ if step < 1e-3 => number(rounded(x, 5)),
            _ => decimals(x, step),
        }
    }

    /// The word that the page's script knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Plain => "plain",
            Unit::Share => "share",
            Unit::Count => "count",
            Unit::Gib => "gib",
        }
    }
}

/// A whole number with commas between groups of three digits.
pub fn thousands(x: f64) -> String {
    let digits = format!("{:.0}", x.abs());
    let mut text = if x.round() < 0.0 { "-".to_owned() } else { String::new() };
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The nearest number of so many significant digits.
pub(crate) fn rounded(x: f64, digits: usize) -> f64 {
    // What was written as a number reads back as one.
    format!("{x:.*e}", digits.saturating_sub(1)).parse().unwrap_or(x)
}

/// `x` with as many decimals as multiples of `step` need.
fn decimals(x: f64, step: f64) -> String {
    let places = (0..9).find(|places| {
        let scaled = step * 10_f64.powi(*places);
        (scaled - scaled.round()).abs() < 1e-6 * scaled
    });
    let text = format!("{x:.*}", places.unwrap_or(9) as usize);
    if text.trim_start_matches('-').chars().all(|c| c == '0' || c == '.') { "0".to_owned() } else { text }
}

/// A closed range of an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// The smallest number shown.
    pub low: f64,
    /// The largest.
    pub high: f64,
}

impl Range {
    /// Holds every value, and zero if `from_zero`, with a margin (a share of itself) beyond values that are not zero;
    /// never empty.
    pub(super) fn of(values: impl Iterator<Item = f64>, from_zero: bool, margin: f64) -> Range {
        let ends = (f64::INFINITY, f64::NEG_INFINITY);
        let (mut low, mut high) = values.fold(ends, |(a, b), x| (a.min(x), b.max(x)));
        if low > high {
            return Range { low: 0.0, high: 1.0 };
        }
        if from_zero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if low == high {
            let half = if low == 0.0 { 0.5 } else { low.abs() * 0.05 };
            return Range { low: low - half, high: high + half };
        }
        // Halves, so that no difference is too large for a number.
        let edge = (high / 2.0 - low / 2.0) * margin * 2.0;
        let outside = |x: f64, moved: f64| if from_zero && x == 0.0 { x } else { moved.clamp(f64::MIN, f64::MAX) };
        Range { low: outside(low, low - edge), high: outside(high, high + edge) }
    }

    /// Where `x` lies: 0 at the low end, 1 at the high one.
    pub(super) fn share(self, x: f64) -> f64 {
        (x / 2.0 - self.low / 2.0) / (self.high / 2.0 - self.low / 2.0)
    }

    /// Round numbers inside the range, about `count` of them and at least `least` apart, and their distance.
    pub(super) fn ticks(self, count: usize, least: f64) -> (Vec<f64>, f64) {
        let count = count.max(1);
        let rough = (self.high / count as f64 - self.low / count as f64).max(least);
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|x| x * power).into_iter().find(|s| *s >= rough * 0.7);
        let step = step.unwrap_or(rough);
        if !(step.is_finite() && step > 0.0) {
            return (Vec::new(), 1.0);
        }
        let first = (self.low / step - 1e-9).ceil();
        let ticks = (0..2 * count + 4).map(|i| (first + i as f64) * step);
        (ticks.take_while(|x| *x <= self.high + step * 1e-9).collect(), step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(unit: Unit, low: f64, high: f64, count: usize) -> Vec<String> {
        let (ticks, step) = Range { low, high }.ticks(count, 0.0);
        ticks.into_iter().map(|x| unit.tick(x, step)).collect()
    }

    #[test]
    fn ticks_are_round_numbers_with_the_digits_they_need() {
        assert_eq!(labels(Unit::Plain, 4.43, 6.31, 5), ["4.5", "5.0", "5.5", "6.0"]);
        assert_eq!(labels(Unit::Share, 0.0, 1.0, 5), ["0%", "20%", "40%", "60%", "80%", "100%"]);
        assert_eq!(labels(Unit::Plain, 0.0, 1e-5, 5), ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]);
        assert_eq!(labels(Unit::Count, 0.0, 21_000.0, 4), ["0", "5,000", "10,000", "15,000", "20,000"]);
        assert_eq!(labels(Unit::Gib, 0.0, 0.034, 4), ["0", "0.01", "0.02", "0.03"]);
        assert_eq!(labels(Unit::Plain, -1.2, 1.2, 5), ["-1.0", "-0.5", "0", "0.5", "1.0"]);
        assert_eq!(Range { low: 0.0, high: 3.0 }.ticks(6, 1.0), (vec![0.0, 1.0, 2.0, 3.0], 1.0));
    }

    #[test]
    fn ranges_hold_every_value() {
        let of = |values: &[f64], zero, margin| Range::of(values.iter().copied(), zero, margin);
        assert_eq!(of(&[1.0, 3.0], false, 0.05), Range { low: 0.9, high: 3.1 });
        assert_eq!(of(&[1.0, 3.0], true, 0.1), Range { low: 0.0, high: 3.3 });
        assert_eq!(of(&[4.0], false, 0.05), Range { low: 3.8, high: 4.2 });
        assert_eq!(of(&[0.0, 0.0], true, 0.05), Range { low: -0.5, high: 0.5 });
        assert_eq!(of(&[], true, 0.1), Range { low: 0.0, high: 1.0 });
        let widest = of(&[-1e308, 1e308], false, 0.0);
        assert_eq!([-1e308, 0.0, 1e308].map(|x| widest.share(x)), [0.0, 0.5, 1.0]);
    }

    #[test]
    fn values_are_written_by_their_unit() {
        let cases = [
            (Unit::Plain, 6.326_97, "6.3270"),
            (Unit::Plain, 1e-5, "1e-5"),
            (Unit::Plain, 1.0 / 3e6, "3.3333e-7"),
            (Unit::Share, 0.9784, "97.8 %"),
            (Unit::Count, 1_234_567.8, "1,234,568"),
            (Unit::Count, 999.4, "999"),
            (Unit::Gib, 0.031_25, "0.031 GiB"),
        ];
        for (unit, x, text) in cases {
            assert_eq!(unit.format(x), text);
        }
        assert_eq!(thousands(-1000.0), "-1,000");
    }
}
