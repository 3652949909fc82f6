//! Tokenizers: bytes, and tokenizer.json.

use super::*;
use serde_json::{Value, json};

/// Byte-level BPE without merges: every byte is a token (ids 3 and up, in the order of the byte alphabet), `<s>` is 0,
/// `</s>` is 1. `template` is the post-processor.
fn byte_level(template: Value) -> Tokenizer {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab: serde_json::Map<String, Value> =
        alphabet.iter().enumerate().map(|(i, c)| (c.to_string(), json!(i + 3))).collect();
    vocab.extend([("<s>".to_owned(), json!(0)), ("</s>".to_owned(), json!(1)), ("<unk>".to_owned(), json!(2))]);
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let json = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "normalizer": null, "pre_tokenizer": level, "post_processor": template, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    });
    Tokenizer::from_json(json.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap()
}

fn template(pieces: Value) -> Value {
    let token = |id: &str, n: u32| json!({"id": id, "ids": [n], "tokens": [id]});
    json!({"type": "TemplateProcessing", "single": pieces, "pair": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": token("<s>", 0), "</s>": token("</s>", 1)}})
}

fn begin_and_end() -> Tokenizer {
    byte_level(template(json!([
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}}
    ])))
}

#[test]
fn the_byte_tokenizer_is_the_bytes() {
    let t = Tokenizer::Byte;
    assert_eq!(t.encode("aé").unwrap(), [97, 0xc3, 0xa9]);
    assert_eq!(t.decode(&[97, 0xc3, 0xa9, 300], false).unwrap(), "aé");
    assert_eq!(t.vocab_size(), 256);
}

#[test]
fn the_template_is_applied_exactly_once_and_nothing_is_cut_or_filled() {
    let t = begin_and_end();
    let plain = byte_level(Value::Null);
    let body = plain.encode("hello world").unwrap();
    assert_eq!(body.len(), 11);
    let whole = [&[0], &body[..], &[1]].concat();
    for text in ["hello world", "<s>hello world", "hello world</s>", "<s>hello world</s>"] {
        assert_eq!(t.encode(text).unwrap(), whole, "{text}");
    }
    assert_eq!(t.encode_prompt("<s>hello world").unwrap(), whole[..12]);
    assert_eq!(plain.encode_prompt("<s>hello world").unwrap(), whole[..12]);
    // A second one that the text really has stays.
    assert_eq!(t.encode("<s><s>").unwrap(), [0, 0, 1]);
    assert_eq!(t.encode("").unwrap(), [0, 1]);
    assert_eq!(t.decode(&whole, false).unwrap(), "hello world");
    assert_eq!(t.decode(&whole, true).unwrap(), "<s>hello world</s>");
    assert_eq!(t.vocab_size(), 259);
}

#[test]
fn streamed_text_never_breaks_a_character_and_loses_none() {
    let text = "né 日本 🦀!";
    for t in [Tokenizer::Byte, begin_and_end()] {
        let mut stream = TextStream::default();
        let mut out = String::new();
        for id in t.encode(text).unwrap() {
            let part = stream.push(&t, id).unwrap();
            assert!(!part.contains('\u{fffd}'), "{part:?}");
            out.push_str(&part);
        }
        out.push_str(&stream.finish(&t).unwrap());
        assert_eq!(out, text);
    }
}

#[test]
fn bytes_that_are_no_text_come_out_as_replacement_characters() {
    let mut stream = TextStream::default();
    let mut out = String::new();
    for id in [b'a', 0xff, 0xff, 0xff, 0xff, b'b', 0xe6] {
        out.push_str(&stream.push(&Tokenizer::Byte, u32::from(id)).unwrap());
    }
    out.push_str(&stream.finish(&Tokenizer::Byte).unwrap());
    assert_eq!(out, format!("a{0}{0}{0}{0}b{0}", '\u{fffd}'));
}

#[test]
fn a_folder_without_a_tokenizer_is_an_error_only_when_text_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let lazy = LazyTokenizer::folder(dir.path());
    let failure = lazy.get().unwrap_err();
    assert_eq!(failure.exit, crate::Exit::Input);
    assert!(failure.place.unwrap().ends_with("tokenizer.json"));
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert!(lazy.get().unwrap_err().what.contains("cannot be used"));
    assert!(matches!(LazyTokenizer::byte().get(), Ok(Tokenizer::Byte)));
}

#[test]
fn the_written_byte_tokenizer_gives_every_text_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, crate::data::byte_tokenizer_json().to_string()).unwrap();
    let written = Tokenizer::from_folder(dir.path()).unwrap();
    assert_eq!(written.vocab_size(), 256);
    let every_low = (0..=127u8).map(char::from).collect::<String>();
    for text in ["To be, or not\r\n\t to  be", "日本 🦀 é\u{ad}\u{a0}", &every_low] {
        let ids = written.encode(text).unwrap();
        assert_eq!(ids, Tokenizer::Byte.encode(text).unwrap(), "{text:?}");
        assert_eq!(written.decode(&ids, false).unwrap(), text);
    }
}
