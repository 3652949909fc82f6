//! Curves as SVG pictures whose text stays text.

use crate::{Failure, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::error::Error;
use std::ops::Range;
use std::path::Path;

/// Width and height in pixels.
const SIZE: (u32, u32) = (900, 540);
/// Narrowest and widest column beside the chart that names the curves, where no curve can run under it.
const LEGEND_WIDTH: (u32, u32) = (130, 360);
/// Where a name begins in that column, behind a piece of its line.
const LEGEND_INDENT: u32 = 32;
/// Width of a character of a name at most; SVG leaves the font to the reader, so this is generous.
const LEGEND_CHARACTER: u32 = 9;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);

/// Colours that colour-blind readers tell apart: Okabe and Ito, "Color Universal Design" (2008), without its yellow, which
/// is too light for a line on white; black last, for a seventh curve.
const PALETTE: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2), // blue
    RGBColor(0xd5, 0x5e, 0x00), // vermilion
    RGBColor(0x00, 0x9e, 0x73), // bluish green
    RGBColor(0xcc, 0x79, 0xa7), // reddish purple
    RGBColor(0x56, 0xb4, 0xe9), // sky blue
    RGBColor(0xe6, 0x9f, 0x00), // orange
    RGBColor(0x00, 0x00, 0x00), // black
];

/// One named curve.
pub type Curve = (String, Vec<(f64, f64)>);

/// Draws curves of loss over step into the file `path`, with a legend. Points that are not finite leave gaps.
///
/// # Errors
/// A disk failure (exit 7) if the file cannot be written; a bug (exit 1) if the picture cannot be drawn.
pub fn loss_curves(path: &Path, title: &str, curves: &[Curve]) -> Result<()> {
    let picture = draw(title, "step", "loss", curves).map_err(|e| {
        Failure::new(crate::Exit::Bug, "the loss curves could not be drawn").at(path.display()).found(e)
    })?;
    std::fs::write(path, picture).map_err(|e| {
        Failure::disk("the picture of the loss curves could not be written")
            .at(path.display())
            .found(e)
            .hint("a folder that exists and may be written")
    })
}

/// The SVG text of named curves over labelled axes.
fn draw(title: &str, x_label: &str, y_label: &str, curves: &[Curve]) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let (left, right) = area.split_horizontally(SIZE.0 - legend_width(curves));
        chart(&left, title, (x_label, y_label), curves)?;
        legend(&right, curves)?;
        area.present()?;
    }
    Ok(text)
}

/// The chart itself, into any area.
fn chart<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    title: &str,
    labels: (&str, &str),
    curves: &[Curve],
) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let points = || curves.iter().flat_map(|(_, points)| points.iter()).filter(|(x, y)| x.is_finite() && y.is_finite());
    let (x, y) = (span(points().map(|p| p.0), 0.0), span(points().map(|p| p.1), 0.05));
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 22).into_font().color(&INK))
        .margin(18)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc(labels.0)
        .y_desc(labels.1)
        .axis_desc_style((FONT, 16).into_font().color(&INK))
        .label_style((FONT, 14).into_font().color(&INK))
        .axis_style(INK)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .draw()?;
    for (i, (_, points)) in curves.iter().enumerate() {
        let style = line_style(i);
        for piece in points.split(|(x, y)| !(x.is_finite() && y.is_finite())).filter(|piece| !piece.is_empty()) {
            chart.draw_series(LineSeries::new(piece.iter().copied(), style))?;
        }
    }
    Ok(())
}

/// How curve `i` is drawn. The first, with which the others are compared, is wider, so that it still shows where another
/// runs over it.
fn line_style(i: usize) -> ShapeStyle {
    PALETTE[i % PALETTE.len()].stroke_width(if i == 0 { 6 } else { 2 })
}

/// The legend's column, as wide as its longest name wants.
fn legend_width(curves: &[Curve]) -> u32 {
    let longest = curves.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let wanted = u32::try_from(longest).unwrap_or(u32::MAX).saturating_mul(LEGEND_CHARACTER);
    wanted.saturating_add(LEGEND_INDENT + 10).clamp(LEGEND_WIDTH.0, LEGEND_WIDTH.1)
}

/// A name that fits the widest legend: of a long one its end, which tells paths apart.
fn legend_name(name: &str) -> String {
    let room = ((LEGEND_WIDTH.1 - LEGEND_INDENT) / LEGEND_CHARACTER) as usize;
    match name.chars().count() {
        n if n > room => "…".chars().chain(name.chars().skip(n - room + 1)).collect(),
        _ => name.to_owned(),
    }
}

/// The curves' colours and names, from the top down, in an area of their own.
fn legend<B: DrawingBackend>(area: &DrawingArea<B, Shift>, curves: &[Curve]) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let words = (FONT, 15).into_font().color(&INK);
    for (i, (name, _)) in curves.iter().enumerate() {
        let y = 60 + 24 * i as i32;
        area.draw(&PathElement::new([(0, y), (24, y)], line_style(i)))?;
        area.draw(&Text::new(legend_name(name), (LEGEND_INDENT as i32, y - 7), words.clone()))?;
    }
    Ok(())
}

/// The range of some values, widened by a share of itself on both sides; never empty.
fn span(values: impl Iterator<Item = f64>, widen: f64) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
    if low > high {
        return 0.0..1.0;
    }
    if low == high {
        let half = (low.abs() * 0.05).max(0.5);
        return low - half..high + half;
    }
    let edge = (high - low) * widen;
    low - edge..high + edge
}

/// A tick's number, without the digits that binary fractions leave behind.
fn tick(x: &f64) -> String {
    let rounded = (x * 1e6).round() / 1e6;
    if rounded == 0.0 { "0".to_owned() } else { format!("{rounded}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(name: &str, ys: &[f64]) -> Curve {
        (name.to_owned(), ys.iter().enumerate().map(|(i, y)| (i as f64, *y)).collect())
    }

    #[test]
    fn a_picture_has_its_words_as_text_and_a_line_per_curve() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        let curves = [curve("shadow", &[6.3, 5.9, 5.6]), curve("fsdp-low <&>", &[6.3, 6.29, 6.27])];
        loss_curves(&path, "Loss by policy", &curves).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for word in ["Loss by policy", "step", "loss", "shadow", "fsdp-low &lt;&amp;&gt;"] {
            assert!(svg.contains(word), "{word}");
        }
        for colour in ["#0072B2", "#D55E00"] {
            // Once as a curve, once in the legend.
            assert_eq!(svg.lines().filter(|l| l.starts_with("<polyline") && l.contains(colour)).count(), 2, "{colour}");
        }
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn a_value_that_is_not_finite_is_a_gap() {
        let svg = draw("t", "x", "y", &[curve("a", &[3.0, 2.0, f64::NAN, 1.5, 1.0])]).unwrap();
        // Two pieces and one legend.
        assert_eq!(svg.lines().filter(|l| l.starts_with("<polyline") && l.contains("#0072B2")).count(), 3);
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn no_points_and_equal_points_still_draw() {
        for curves in [vec![], vec![curve("a", &[])], vec![curve("a", &[2.0])], vec![curve("a", &[0.0, 0.0])]] {
            assert!(draw("t", "x", "y", &curves).unwrap().ends_with("</svg>\n"));
        }
    }

    #[test]
    fn the_legend_is_as_wide_as_its_names_and_cuts_the_longest() {
        assert_eq!(legend_width(&[curve("a", &[])]), LEGEND_WIDTH.0);
        assert_eq!(legend_width(&[curve("seventeen letters", &[])]), 17 * 9 + 42);
        let long = format!("{}/end", "x".repeat(90));
        assert_eq!(legend_width(&[curve(&long, &[])]), LEGEND_WIDTH.1);
        let shown = legend_name(&long);
        assert!(shown.starts_with('…') && shown.ends_with("x/end") && shown.chars().count() == 36, "{shown}");
    }

    #[test]
    fn ranges_hold_every_value() {
        assert_eq!(span([1.0, 3.0].into_iter(), 0.05), 0.9..3.1);
        assert_eq!(span([4.0].into_iter(), 0.05), 3.5..4.5);
        assert_eq!(span([100.0].into_iter(), 0.0), 95.0..105.0);
        assert_eq!(span(std::iter::empty(), 0.1), 0.0..1.0);
    }

    #[test]
    fn a_folder_that_is_not_there_is_a_disk_failure() {
        let folder = tempfile::tempdir().unwrap();
        let failure = loss_curves(&folder.path().join("no/loss.svg"), "t", &[curve("a", &[1.0])]).unwrap_err();
        assert_eq!(failure.exit, crate::Exit::Disk);
    }
}
