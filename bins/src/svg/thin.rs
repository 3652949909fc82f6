//! Fewer points of a long curve, and smoother ones.

use super::Point;

/// Points of one curve that a picture can show side by side; more are thinned out.
pub const COLUMNS: usize = 640;

/// Of a curve of more than two points a column, the lowest and the highest of each of [`COLUMNS`] columns of equally many
/// steps, in their order, so that no extreme is lost. A column without any value is a gap.
pub fn thin(points: &[Point]) -> Vec<Point> {
    if points.len() <= 2 * COLUMNS {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(2 * COLUMNS);
    for column in columns(points.len()) {
        let column = &points[column];
        let values = || column.iter().enumerate().filter_map(|(i, (_, y))| Some((i, (*y)?)));
        let low = values().min_by(|a, b| a.1.total_cmp(&b.1));
        let high = values().max_by(|a, b| a.1.total_cmp(&b.1));
        match (low, high) {
            (Some((a, _)), Some((b, _))) => {
                kept.push(column[a.min(b)]);
                kept.extend((a != b).then(|| column[a.max(b)]));
            }
            _ => kept.extend(column.first()),
        }
    }
    kept
}

/// The mean of `reach` points on both sides of every point, at the beginning of fewer, so that the curve starts at its
/// first value, and at the end of those there are. A point without a value stays a gap. A long curve is smoothed at one
/// point a column.
pub fn smooth(points: &[Point], reach: usize) -> Vec<Point> {
    let at = |i: usize| {
        let reach = reach.min(i);
        let around = points[i - reach..points.len().min(i + reach + 1)].iter().filter_map(|(_, y)| *y);
        let (sum, n) = around.fold((0.0, 0_u32), |(sum, n), y| (sum + y, n + 1));
        (points[i].0, points[i].1.map(|_| sum / f64::from(n.max(1))))
    };
    if points.len() <= 2 * COLUMNS {
        return (0..points.len()).map(at).collect();
    }
    let sampled = columns(points.len()).map(|column| column.start);
    sampled.chain([points.len() - 1]).map(at).collect()
}

fn columns(len: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..COLUMNS).map(move |c| c * len / COLUMNS..(c + 1) * len / COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_lowest_and_the_highest_of_every_column() {
        // A hundred points a column; each column's lowest is at 30 and its highest at 70.
        let value = |i: usize| match i % 100 {
            30 => -1.0 - i as f64,
            70 => 1.0 + i as f64,
            _ => 0.0,
        };
        let long: Vec<Point> = (0..100 * COLUMNS).map(|i| (i as f64, Some(value(i)))).collect();
        let kept = thin(&long);
        assert_eq!(kept.len(), 2 * COLUMNS);
        for (c, pair) in kept.chunks(2).enumerate() {
            let (low, high) = (100 * c + 30, 100 * c + 70);
            assert_eq!(pair, [(low as f64, Some(value(low))), (high as f64, Some(value(high)))]);
        }
    }

    #[test]
    fn short_curves_stay_as_they_are_and_an_empty_column_is_a_gap() {
        let short = [(0.0, Some(1.0)), (1.0, None)];
        assert_eq!(thin(&short), short);
        let empty = |i: usize| (500..800).contains(&i);
        let long: Vec<Point> = (0..100 * COLUMNS).map(|i| (i as f64, (!empty(i)).then_some(2.0))).collect();
        let kept = thin(&long);
        let gaps: Vec<f64> = kept.iter().filter(|(_, y)| y.is_none()).map(|(x, _)| *x).collect();
        assert_eq!(gaps, [500.0, 600.0, 700.0]);
    }

    #[test]
    fn smoothing_keeps_the_beginning_and_the_gaps() {
        let values = [Some(9.0), Some(3.0), Some(6.0), None, Some(2.0), Some(1.0)];
        let points: Vec<Point> = values.into_iter().enumerate().map(|(i, y)| (i as f64, y)).collect();
        // (9+3+6)/3 = 6, (3+6)/2 = 4.5, (2+1)/2 = 1.5.
        let expected = [Some(9.0), Some(6.0), Some(4.5), None, Some(1.5), Some(1.5)];
        assert_eq!(smooth(&points, 1).into_iter().map(|(_, y)| y).collect::<Vec<_>>(), expected);
        assert_eq!(smooth(&points, 0), points);
        // A long one is smoothed at the start of every column and at its end.
        let long: Vec<Point> = (0..10 * COLUMNS).map(|i| (i as f64, Some(i as f64))).collect();
        let smoothed = smooth(&long, 3);
        assert_eq!(smoothed.len(), COLUMNS + 1);
        assert_eq!((smoothed[1], smoothed[COLUMNS]), ((10.0, Some(10.0)), (6399.0, Some(6397.5))));
    }
}
