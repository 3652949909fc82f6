//! Curves as SVG whose text stays text: alone in a file, or in a page that styles them.
//!
//! Everything has its light colour as an attribute, so that a file looks right in any viewer, and a class, by which a page
//! gives it another one.

mod scale;
mod thin;

pub(crate) use scale::rounded;
pub use scale::{Range, Unit, thousands};
use std::fmt::Write;
pub use thin::{COLUMNS, smooth, thin};

/// A step and its value; none leaves a gap.
pub type Point = (f64, Option<f64>);

/// Colours that colour-blind readers tell apart: Okabe and Ito, "Color Universal Design" (2008), without its yellow, which
/// is too light for a line on white; black last, for a seventh run.
const PALETTE: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];
/// Dashes of the runs, for readers and printers without colours. Later runs are drawn over earlier ones, which show
/// through. There are as many as colours, less one: a run after the seventh has a colour with another pattern.
const DASHES: [&str; 6] = ["none", "7 3", "2 3", "10 3 2 3", "14 4", "5 2 2 2 2 2"];
const INK: &str = "#333333";
const GRID: &str = "#e2e2e2";

/// What one run shows in a chart.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    /// Its name at the end of the line.
    pub name: String,
    /// Every step.
    pub points: Vec<Point>,
    /// The same, smoothed; if there is any, `points` are drawn faintly under it.
    pub smoothed: Vec<Point>,
    /// What was planned, as a thin line.
    pub plan: Vec<Point>,
}

/// Curves of one quantity over steps, a run each. A curve's place gives it its colour and dashes.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// What the values are.
    pub unit: Unit,
    /// Whether the axis shows zero.
    pub from_zero: bool,
    /// The runs.
    pub curves: Vec<Curve>,
}

/// The place of a chart's parts, in pixels, or what a page makes of them.
#[derive(Debug, Clone, Copy)]
struct Frame {
    width: f64,
    height: f64,
    left: f64,
    top: f64,
    bottom: f64,
    /// Size of letters.
    font: f64,
    /// Letters of a name at the end of a line.
    letters: usize,
}

const ALONE: Frame =
    Frame { width: 900.0, height: 540.0, left: 76.0, top: 64.0, bottom: 60.0, font: 15.0, letters: 36 };
const INLINE: Frame =
    Frame { width: 640.0, height: 340.0, left: 62.0, top: 14.0, bottom: 36.0, font: 13.0, letters: 12 };

/// Width of a letter at most, as a share of the font's size; SVG leaves the font to the reader, so this is generous.
const LETTER: f64 = 0.6;
/// Length of the piece of line before a name.
const SAMPLE: f64 = 22.0;

/// A chart that a page shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Inline {
    /// The element.
    pub svg: String,
    /// Its width over the width up to the end of the lines: what a narrow page may leave out.
    pub stretch: f64,
}

/// Where the numbers of a chart lie.
struct Plot {
    frame: Frame,
    /// Width and height of the area of lines.
    size: (f64, f64),
    x: Range,
    y: Range,
}

impl Chart {
    /// The chart as a file of its own.
    pub fn alone(&self) -> String {
        let plot = self.plot(ALONE, true);
        let Frame { width, height, left, top, bottom, font, .. } = plot.frame;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"{font}\">\n<title>{title}</title>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
             <text x=\"{left}\" y=\"{y}\" font-size=\"20\" font-weight=\"600\" fill=\"{INK}\">{title}</text>\n",
            title = escape(&self.title),
            y = top / 2.0 + 4.0,
        );
        let (x, y) = (left + plot.size.0 / 2.0, height - bottom / 4.0);
        text(&mut out, (x, y), "middle", "step");
        self.draw(&plot, true, &mut out);
        out + "</svg>\n"
    }

    /// The chart for a page, which has its title beside it. With `names` the ends of lines have names.
    pub fn inline(&self, names: bool) -> Inline {
        let plot = self.plot(INLINE, names);
        let Frame { width, height, left, top, font, .. } = plot.frame;
        let (w, h) = plot.size;
        let mut out = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {width} {height}\" font-size=\"{font}\" role=\"img\" tabindex=\"0\" \
             aria-label=\"{title} over steps\" data-plot=\"{left} {top} {w} {h}\" data-x=\"{} {}\" data-y=\"{} {}\">\n",
            plot.x.low,
            plot.x.high,
            plot.y.low,
            plot.y.high,
            title = escape(&self.title),
        );
        self.draw(&plot, names, &mut out);
        Inline { svg: out + "</svg>", stretch: width / (left + w + 12.0) }
    }

    fn plot(&self, frame: Frame, names: bool) -> Plot {
        let points = || self.curves.iter().flat_map(|c| c.points.iter().chain(&c.plan).chain(&c.smoothed));
        let values = points().filter_map(|(_, y)| *y);
        let longest = self.curves.iter().map(|c| c.name.chars().count().min(frame.letters)).max();
        let right = match longest.filter(|_| names) {
            Some(letters) => SAMPLE + 20.0 + letters as f64 * frame.font * LETTER,
            None => 16.0,
        };
        let size = (frame.width - frame.left - right, frame.height - frame.top - frame.bottom);
        let x = Range::of(points().map(|(x, _)| *x), false, 0.0);
        Plot { frame, size, x, y: Range::of(values, self.from_zero, 0.05) }
    }

    fn draw(&self, plot: &Plot, names: bool, out: &mut String) {
        plot.axes(self.unit, out);
        for (i, curve) in self.curves.iter().enumerate() {
            let (colour, dash) = (PALETTE[i % PALETTE.len()], DASHES[i % DASHES.len()]);
            let class = i % PALETTE.len();
            let _ = writeln!(
                out,
                "<g class=\"run c{class}\" data-run=\"{i}\" fill=\"none\" stroke=\"{colour}\" stroke-dasharray=\"{dash}\">"
            );
            // The first, with which the others are compared, is wider, so that it shows where another lies on it.
            let width = if i == 0 && self.curves.len() > 1 { 4 } else { 2 };
            let main = format!("stroke-width=\"{width}\"");
            if curve.smoothed.is_empty() {
                plot.line("line", &main, &curve.points, out);
            } else {
                plot.line(
                    "faint",
                    "stroke-width=\"1\" stroke-opacity=\"0.28\" stroke-dasharray=\"none\"",
                    &curve.points,
                    out,
                );
                plot.line("line smooth", &main, &curve.smoothed, out);
            }
            plot.line("plan", "stroke-width=\"1.5\" stroke-dasharray=\"1 4\"", &curve.plan, out);
            out.push_str("</g>\n");
        }
        if names {
            self.names(plot, out);
        }
    }

    /// Names beside the last values, each with a piece of its line, moved apart where they would lie on each other.
    fn names(&self, plot: &Plot, out: &mut String) {
        let frame = plot.frame;
        let last = |curve: &Curve| {
            let drawn = if curve.smoothed.is_empty() { &curve.points } else { &curve.smoothed };
            let y = drawn.iter().rev().find_map(|(_, y)| *y)?;
            Some(plot.at(plot.x.high, y).1)
        };
        let bottom = frame.top + plot.size.1;
        let wanted: Vec<f64> = self.curves.iter().map(|curve| last(curve).unwrap_or(bottom)).collect();
        let heights = apart(&wanted, frame.font * 1.45, (frame.top, bottom));
        let x = frame.left + plot.size.0 + 10.0;
        for (i, (curve, y)) in self.curves.iter().zip(heights).enumerate() {
            let (colour, class) = (PALETTE[i % PALETTE.len()], i % PALETTE.len());
            let _ = writeln!(
                out,
                "<g class=\"name c{class}\" data-run=\"{i}\"><path d=\"M{} {}H{}\" fill=\"none\" stroke=\"{colour}\" \
                 stroke-width=\"2\" stroke-dasharray=\"{}\"/>",
                short(x),
                short(y),
                short(x + SAMPLE),
                DASHES[i % DASHES.len()]
            );
            let at = (x + SAMPLE + 6.0, y + frame.font * 0.35);
            text(out, at, "start", &tail(&curve.name, frame.letters));
            out.push_str("</g>\n");
        }
    }
}

impl Plot {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let Frame { left, top, .. } = self.frame;
        (left + self.x.share(x) * self.size.0, top + (1.0 - self.y.share(y)) * self.size.1)
    }

    /// Thin lines across at round values, and the numbers of both axes.
    fn axes(&self, unit: Unit, out: &mut String) {
        let Frame { left, top, font, .. } = self.frame;
        let (right, bottom) = (left + self.size.0, top + self.size.1);
        let (ticks, step) = self.y.ticks((self.size.1 / 56.0) as usize, 0.0);
        for tick in ticks {
            let y = self.at(self.x.low, tick).1;
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{} {}H{}\" stroke=\"{GRID}\"/>",
                short(left),
                short(y),
                short(right)
            );
            text(out, (left - 8.0, y + font * 0.35), "end", &unit.tick(tick, step));
        }
        let _ = writeln!(
            out,
            "<path class=\"axis\" d=\"M{} {}H{}\" stroke=\"{INK}\"/>",
            short(left),
            short(bottom),
            short(right)
        );
        let (ticks, step) = self.x.ticks((self.size.0 / 90.0) as usize, 1.0);
        for tick in ticks {
            let x = self.at(tick, self.y.low).0;
            text(out, (x, bottom + font * 1.6), "middle", &Unit::Count.tick(tick, step));
        }
    }

    /// A line through the points; a gap where there is no value, and a dot where there is nothing to go to.
    fn line(&self, class: &str, style: &str, points: &[Point], out: &mut String) {
        let mut path = String::new();
        let mut dots = String::new();
        for piece in thin(points).split(|(_, y)| y.is_none()).filter(|piece| !piece.is_empty()) {
            let places: Vec<(String, String)> =
                piece.iter().filter_map(|(x, y)| Some(self.at(*x, (*y)?))).map(|(x, y)| (short(x), short(y))).collect();
            if let [(x, y)] = places.as_slice() {
                let _ = write!(dots, "M{x} {y}h0");
                continue;
            }
            for (i, (x, y)) in places.iter().enumerate() {
                // Inside a level stretch nothing needs to be said.
                let level = i > 0 && places.get(i + 1).is_some_and(|next| next.1 == *y && places[i - 1].1 == *y);
                if !level {
                    let _ = write!(path, "{}{x} {y}", if i == 0 { 'M' } else { 'L' });
                }
            }
        }
        if !path.is_empty() {
            let _ = writeln!(out, "<path class=\"{class}\" {style} stroke-linejoin=\"round\" d=\"{path}\"/>");
        }
        if !dots.is_empty() {
            // A line of no length with round ends has the colour of the others.
            let _ = writeln!(
                out,
                "<path class=\"{class} dot\" stroke-width=\"6\" stroke-dasharray=\"none\" stroke-linecap=\"round\" d=\"{dots}\"/>"
            );
        }
    }
}

/// A piece of a run's line, as a legend shows it.
pub fn sample(run: usize) -> String {
    format!(
        "<svg class=\"sample c{class}\" data-run=\"{run}\" width=\"30\" height=\"10\" viewBox=\"0 0 30 10\" aria-hidden=\"true\">\
         <path class=\"line\" d=\"M0 5H30\" fill=\"none\" stroke=\"{}\" stroke-width=\"2.5\" stroke-dasharray=\"{}\"/></svg>",
        PALETTE[run % PALETTE.len()],
        DASHES[run % DASHES.len()],
        class = run % PALETTE.len(),
    )
}

/// Text of files as text of XML and HTML, in attributes too.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML has no way to write the others.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn text(out: &mut String, at: (f64, f64), anchor: &str, words: &str) {
    let (x, y) = (short(at.0), short(at.1));
    let _ = writeln!(out, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"{INK}\">{}</text>", escape(words));
}

/// A place in a picture to a tenth of a pixel.
fn short(x: f64) -> String {
    let text = format!("{x:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

/// A name of at most `letters` letters: of a long one its end, which tells paths apart.
fn tail(name: &str, letters: usize) -> String {
    match name.chars().count() {
        n if n > letters => "…".chars().chain(name.chars().skip(n + 1 - letters)).collect(),
        _ => name.to_owned(),
    }
}

/// Heights near those wanted, at least `distance` apart and within `bounds` as far as there is room, in the same order.
fn apart(wanted: &[f64], distance: f64, bounds: (f64, f64)) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let distance = distance.min((bounds.1 - bounds.0) / wanted.len().saturating_sub(1).max(1) as f64);
    let mut heights = wanted.to_vec();
    let mut least = bounds.0;
    for i in &order {
        heights[*i] = heights[*i].max(least);
        least = heights[*i] + distance;
    }
    let mut most = bounds.1;
    for i in order.iter().rev() {
        heights[*i] = heights[*i].min(most);
        most = heights[*i] - distance;
    }
    heights
}

#[cfg(test)]
mod tests;
