//! Pictures, number by number.

use super::*;

fn curve(name: &str, ys: &[Option<f64>]) -> Curve {
    let points = ys.iter().enumerate().map(|(i, y)| (i as f64, *y)).collect();
    Curve { name: name.to_owned(), points, ..Curve::default() }
}

fn chart(curves: Vec<Curve>) -> Chart {
    Chart { title: "Loss by policy".to_owned(), unit: Unit::Plain, from_zero: true, curves }
}

/// The `d` of every path of class `class`.
fn paths<'a>(svg: &'a str, class: &str) -> Vec<&'a str> {
    let of_class = svg.lines().filter(|l| l.starts_with(&format!("<path class=\"{class}\"")));
    of_class.filter_map(|l| l.split(" d=\"").nth(1)?.split('"').next()).collect()
}

#[test]
fn points_lie_where_their_numbers_are() {
    // Without names the lines have 640 - 62 - 16 = 562 by 340 - 14 - 36 = 290 pixels from (62, 14). The largest value, 100,
    // with 5 % above it makes the axis end at 105.
    let svg = chart(vec![curve("a", &[Some(0.0), Some(52.5), Some(100.0)])]).inline(false).svg;
    assert!(svg.contains("data-plot=\"62 14 562 290\" data-x=\"0 2\" data-y=\"0 105\""), "{svg}");
    // 14 + 290·5/105 = 27.8.
    assert_eq!(paths(&svg, "line"), ["M62 304L343 159L624 27.8"]);
    // Ticks at 0, 20 … 100; step 1 in the middle.
    assert_eq!(paths(&svg, "grid").len(), 6);
    assert!(svg.contains("<text x=\"343\" y=\"324.8\" text-anchor=\"middle\" fill=\"#333333\">1</text>"), "{svg}");
}

#[test]
fn a_missing_value_is_a_gap_and_a_lonely_one_a_dot() {
    let svg = chart(vec![curve("a", &[Some(1.0), Some(2.0), None, Some(2.0), None, Some(1.0), Some(1.0)])]);
    let svg = svg.inline(false).svg;
    let line = paths(&svg, "line")[0];
    assert_eq!(line.matches('M').count(), 2, "{line}");
    assert_eq!(line.matches('L').count(), 2, "{line}");
    // The fourth of seven points is in the middle; 304 - 290·2/2.1 = 27.8.
    assert_eq!(paths(&svg, "line dot"), ["M343 27.8h0"]);
    let one = chart(vec![curve("a", &[Some(5.0)])]).inline(false).svg;
    assert_eq!((paths(&one, "line dot").len(), paths(&one, "line").len()), (1, 0));
    for curves in [vec![], vec![curve("a", &[])], vec![curve("a", &[None, None])], vec![curve("a", &[Some(0.0); 2])]] {
        let svg = chart(curves).alone();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}

#[test]
fn level_stretches_are_two_points() {
    let svg = chart(vec![curve("a", &[Some(2.0), Some(2.0), Some(2.0), Some(2.0), Some(0.0)])]).inline(false).svg;
    assert_eq!(paths(&svg, "line"), ["M62 27.8L483.5 27.8L624 304"]);
}

#[test]
fn a_picture_alone_has_its_words_as_text_and_two_lines_a_run() {
    let curves = vec![curve("shadow", &[Some(6.3), Some(5.9)]), curve("fsdp-low <&>\"", &[Some(6.3), Some(6.29)])];
    let svg = chart(curves).alone();
    for word in ["Loss by policy", ">step<", ">shadow<", "fsdp-low &lt;&amp;&gt;&quot;<"] {
        assert!(svg.contains(word), "{word}");
    }
    // The run and its name.
    for (colour, dash) in [("#0072b2", "none"), ("#d55e00", "7 3")] {
        assert_eq!(svg.matches(&format!("stroke=\"{colour}\"")).count(), 2);
        assert_eq!(svg.matches(&format!("stroke-dasharray=\"{dash}\"")).count(), 2);
    }
}

#[test]
fn no_two_of_forty_two_runs_look_alike() {
    let looks: std::collections::BTreeSet<String> = (0..42).map(sample).collect();
    assert_eq!(looks.len(), 42);
}

#[test]
fn a_smoothed_curve_lies_over_its_faint_steps_and_a_plan_is_dotted() {
    let points = curve("a", &[Some(1.0), Some(3.0)]).points;
    let both = Curve { smoothed: vec![(0.0, Some(2.0)), (1.0, Some(2.0))], plan: points.clone(), ..curve("a", &[]) };
    let svg = chart(vec![Curve { points, ..both }]).inline(true).svg;
    for class in ["faint", "line smooth", "plan"] {
        assert_eq!(paths(&svg, class).len(), 1, "{class}");
    }
    assert_eq!(paths(&svg, "line").len(), 0);
}

#[test]
fn names_keep_apart_and_long_ones_keep_their_ends() {
    assert_eq!(apart(&[10.0, 50.0, 12.0], 15.0, (0.0, 100.0)), [10.0, 50.0, 25.0]);
    assert_eq!(apart(&[99.0, 98.0], 15.0, (0.0, 100.0)), [100.0, 85.0]);
    assert_eq!(apart(&[0.0; 5], 60.0, (0.0, 100.0)), [0.0, 25.0, 50.0, 75.0, 100.0]);
    assert_eq!(tail("out/first/second", 8), "…/second");
    assert_eq!(tail("short", 8), "short");
    let wide = chart(vec![curve("a", &[Some(1.0)])]).inline(false).stretch;
    let named = chart(vec![curve("shadow", &[Some(1.0)])]).inline(true).stretch;
    assert!(wide < 1.01 && named > 1.1, "{wide} {named}");
}

#[test]
fn text_of_files_stays_text() {
    assert_eq!(escape("<a href='x'>&\"\u{1}\n"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}\n");
}
