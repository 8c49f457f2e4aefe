//! JSON as Python writes it.

use serde_json::{Map, Value};

/// Reads an object. The words that Python's `json` writes for numbers JSON has none for (`NaN`, `Infinity`, `-Infinity`, as
/// in the `time_step_limit` of Nemotron-H configs) are read as null: no fact about a cache is such a number.
pub(crate) fn object(text: &str) -> Result<Map<String, Value>, serde_json::Error> {
    // Most texts have none of these words, and then an error names the place in the text as it is.
    match serde_json::from_str(text) {
        Ok(object) => Ok(object),
        Err(error) => match without_words(text) {
            Some(text) => serde_json::from_str(&text),
            None => Err(error),
        },
    }
}

/// The text with `null` for each such word outside of strings; `None` if there is none.
fn without_words(text: &str) -> Option<String> {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    let mut found = false;
    while let Some(letter) = rest.chars().next() {
        let mut taken = letter.len_utf8();
        if letter == '"' {
            taken = string_bytes(rest);
        } else if let Some(word) = ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| rest.starts_with(word)) {
            found = true;
            plain.push_str("null");
            rest = rest.get(word.len()..).unwrap_or_default();
            continue;
        }
        plain.push_str(rest.get(..taken).unwrap_or_default());
        rest = rest.get(taken..).unwrap_or_default();
    }
    found.then_some(plain)
}

/// Bytes of the string that `text` starts with, quotes included; all of them if it does not end.
fn string_bytes(text: &str) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn words_of_python() {
        let check = |text: &str, expected: Value| assert_eq!(Value::Object(object(text).unwrap()), expected, "{text}");
        check(r#"{"a": [0.0, Infinity], "b": -Infinity}"#, json!({"a": [0.0, null], "b": null}));
        check(r#"{"NaN": NaN}"#, json!({"NaN": null}));
        check(r#"{"a": "NaN \" Infinity \\", "b": NaN}"#, json!({"a": "NaN \" Infinity \\", "b": null}));
        check(r#"{"a": "\u00e4\\\\", "ü": Infinity}"#, json!({"a": "\u{e4}\\\\", "ü": null}));
        check(r#"{"a": "Infinity"}"#, json!({"a": "Infinity"}));
    }

    #[test]
    fn text_that_is_no_object() {
        for text in ["", "[]", "NaN", "{", r#"{"a": "NaN"#, r#"{"a": Infinit}"#, r#"{"a": nan}"#, r#"{"a": Infinity"#] {
            assert!(object(text).is_err(), "{text}");
        }
        // The place is that of the text given.
        assert_eq!(object("{\n  oops}").unwrap_err().line(), 2);
    }

    proptest! {
        #[test]
        fn any_text_gives_an_object_or_an_error(text in "[{}\"\\\\a:,NInfity-]{0,40}|\\PC{0,40}") {
            let _ = object(&text);
        }
    }
}
