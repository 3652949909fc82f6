//! The byte tokenizer as a `tokenizer.json`, so that a model trained on bytes is a folder like any other.

use serde_json::{Map, Value, json};

/// A byte-level BPE without merges whose 256 tokens are the bytes in order: it gives the same ids as `Tokenizer::Byte`.
pub fn byte_tokenizer_json() -> Value {
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (spelling(b).to_string(), json!(b))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    })
}

/// The character that stands for a byte in byte-level vocabularies: itself where it is printable and no space in Latin-1,
/// otherwise the next free one from U+0100 on. Source: GPT-2's `bytes_to_unicode`.
fn spelling(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    // 68 bytes are not printable, so this is at most U+0143.
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}
