//! The three sizes.

use super::*;

const MICRO: &str = "\"train_micro_batch_size_per_gpu\"";

fn batch(text: &str) -> String {
    let layer = read(text).unwrap();
    let batch = ["global-batch", "micro-batch", "accum"];
    let found = batch.iter().filter_map(|flag| value(&layer, flag).map(|value| format!("{flag} {value}")));
    found.collect::<Vec<_>>().join(", ")
}

#[test]
fn two_sizes_give_the_third() {
    for (text, expected) in [
        (
            r#"{"train_batch_size": 32, M: 4, "gradient_accumulation_steps": 2}"#,
            "global-batch 32, micro-batch 4, accum 2",
        ),
        (r#"{"train_batch_size": 32, M: 4}"#, "global-batch 32, micro-batch 4"),
        (
            r#"{"train_batch_size": 32, "gradient_accumulation_steps": 2}"#,
            "global-batch 32, micro-batch implied 4, accum 2",
        ),
        (r#"{M: 4, "gradient_accumulation_steps": 2}"#, "micro-batch 4, accum 2"),
        (r#"{"train_batch_size": 32}"#, "global-batch 32, micro-batch implied 8"),
        (r#"{M: 4}"#, "micro-batch 4, accum implied 1"),
        // Automatic sizes follow from the others, or from the flags.
        (
            r#"{"train_batch_size": 32, M: "auto", "gradient_accumulation_steps": 2}"#,
            "global-batch 32, micro-batch implied 4, accum 2",
        ),
        (r#"{"train_batch_size": 32, M: "auto", "gradient_accumulation_steps": "auto"}"#, "global-batch 32"),
        (r#"{"train_batch_size": "auto", M: 4, "gradient_accumulation_steps": "auto"}"#, "micro-batch 4"),
        (r#"{"train_batch_size": "auto", M: "auto"}"#, ""),
        (r#"{M: "auto", "gradient_accumulation_steps": 4}"#, "accum 4"),
        (r#"{M: "auto"}"#, "accum implied 1"),
        // `null` is not written; whole numbers come in any spelling.
        (r#"{"train_batch_size": null, M: 4.0, "gradient_accumulation_steps": "2"}"#, "micro-batch 4, accum 2"),
    ] {
        assert_eq!(batch(&text.replace("M:", &format!("{MICRO}:"))), expected, "{text}");
    }
}

#[test]
fn sizes_that_do_not_fit_show_every_place() {
    let text = "{\n  \"train_batch_size\": 64,\n  \"train_micro_batch_size_per_gpu\": 4,\n  \
                \"gradient_accumulation_steps\": 2\n}";
    let failure = read(text).unwrap_err();
    assert_eq!(failure.what, "train_batch_size 64 is not 4 × 2 × 4");
    assert_eq!(failure.place.as_deref(), Some("ds.json:2:3"));
    assert_eq!(
        failure.expected.as_deref(),
        Some(
            "32 = train_micro_batch_size_per_gpu 4 (ds.json:3:3) × gradient_accumulation_steps 2 (ds.json:4:3) × 4 lanes"
        )
    );
    assert_eq!(failure.found.as_deref(), Some("64"));
    assert_eq!(failure.hint.as_deref(), Some("--lanes 8, on any number of ranks, or leave one of the three out"));
    assert!(read_as(text, &facts(8, "0.19.6"), Auto::DeepSpeed).is_ok(), "the hint is right");
    let odd = text.replace("64", "63");
    fails(&odd, "2:3", "train_batch_size 63 is not 4 × 2 × 4", "it follows from the other two");
}

#[test]
fn a_batch_that_cannot_be_split_is_refused() {
    fails("{\"train_batch_size\": 30}", "1:2", "train_batch_size 30 cannot be split evenly", "--lanes");
    let text = "{\"train_batch_size\": 24,\n \"gradient_accumulation_steps\": 4}";
    let failure = read(text).unwrap_err();
    let expected = "a multiple of gradient_accumulation_steps 4 (ds.json:2:2) × 4 lanes";
    assert_eq!(failure.expected.as_deref(), Some(expected));
    fails(
        &text.replace("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"),
        "1:2",
        "split evenly",
        "--lanes",
    );
}

#[test]
fn a_file_without_sizes_is_refused_as_deepspeed_does() {
    let what = "neither train_batch_size nor train_micro_batch_size_per_gpu";
    fails("{}", "", what, "\"auto\"");
    fails("{\n \"gradient_accumulation_steps\": 2}", "2:2", what, "add \"train_micro_batch_size_per_gpu\": 1");
}

#[test]
fn sizes_are_whole_and_positive() {
    for (value, shown) in [("0", "0"), ("8.5", "8.5"), ("-4", "-4"), ("\"8 rows\"", "\"8 rows\""), ("[8]", "[8]")] {
        let what = format!("train_batch_size cannot be {shown}");
        fails(&format!("{{\"train_batch_size\": {value}}}"), "1:22", &what, "");
    }
}

#[test]
fn who_steps_and_what_is_dropped() {
    let text = with_batch(r#""managed_gradient_accumulation": false, "dataloader_drop_last": true"#);
    let layer = read(&text).unwrap();
    assert!(remark(&layer, "managed_gradient_accumulation").1.contains("--accum"));
    let (saying, why) = remark(&layer, "dataloader_drop_last");
    assert!(saying == Saying::Differs && why.contains("short step"), "{why}");
}
