//! JSON and its superset Hjson (hjson.github.io/syntax.html): comments, quoteless names and text, optional commas, optional
//! braces around the whole. Written here because readers that take this grammar do not keep places, and an error
//! without line and column is no use in a file of a hundred keys.

use super::node::{Entry, Malformed, Node, Spot, Value};

/// Nesting beyond this is refused before it can exhaust the stack.
const MAX_DEPTH: usize = 64;

/// Reads a whole text.
///
/// # Errors
/// Where it leaves the grammar.
pub(super) fn parse(text: &str) -> Result<Node, Malformed> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reader = Reader { rest: text.chars().collect::<Vec<_>>().into_iter().peekable(), line: 1, column: 1 };
    reader.space()?;
    let spot = reader.spot();
    let node = match reader.peek() {
        Some('{' | '[') => reader.value(0)?,
        None => return Err(reader.wrong("a value")),
        // A whole file may leave its braces out.
        Some(_) => Node { value: Value::Map(reader.entries(None, 0)?), spot },
    };
    reader.space()?;
    match reader.peek() {
        None => Ok(node),
        Some(_) => Err(reader.wrong("nothing more")),
    }
}

struct Reader {
    rest: std::iter::Peekable<std::vec::IntoIter<char>>,
    line: usize,
    column: usize,
}

impl Reader {
    fn spot(&self) -> Spot {
        Spot { line: self.line, column: self.column }
    }

    fn peek(&mut self) -> Option<char> {
        self.rest.peek().copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        if c == '\n' {
            (self.line, self.column) = (self.line + 1, 1);
        } else {
            self.column += 1;
        }
        Some(c)
    }

    fn eat(&mut self, c: char) -> bool {
        let there = self.peek() == Some(c);
        if there {
            self.next();
        }
        there
    }

    fn wrong(&mut self, expected: &str) -> Malformed {
        let found = self.peek().map_or("the end of the file".to_owned(), |c| format!("{c:?}"));
        Malformed { spot: self.spot(), expected: expected.to_owned(), found }
    }

    /// White space and comments.
    fn space(&mut self) -> Result<(), Malformed> {
        loop {
            match self.peek() {
                Some(c) if c.is_whitespace() => {
                    self.next();
                }
                Some('#') => self.line_end(),
                Some('/') => {
                    let start = self.spot();
                    self.next();
                    match self.peek() {
                        Some('/') => self.line_end(),
                        Some('*') => self.block_comment(start)?,
                        _ => return Err(self.wrong("a comment: // or /*")),
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn line_end(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.next();
        }
    }

    fn block_comment(&mut self, start: Spot) -> Result<(), Malformed> {
        let mut before = ' ';
        self.next();
        while let Some(c) = self.next() {
            if before == '*' && c == '/' {
                return Ok(());
            }
            before = c;
        }
        Err(Malformed { spot: start, expected: "*/ at the end of the comment".to_owned(), found: "none".to_owned() })
    }

    fn value(&mut self, depth: usize) -> Result<Node, Malformed> {
        if depth > MAX_DEPTH {
            return Err(self.wrong(&format!("at most {MAX_DEPTH} levels")));
        }
        let spot = self.spot();
        let value = match self.peek() {
            Some('{') => {
                self.next();
                Value::Map(self.entries(Some('}'), depth + 1)?)
            }
            Some('[') => {
                self.next();
                Value::List(self.items(depth + 1)?)
            }
            Some(quote @ ('"' | '\'')) => Value::Text(self.quoted(quote)?),
            Some('}' | ']' | ':' | ',') | None => return Err(self.wrong("a value")),
            Some(_) => self.quoteless(),
        };
        Ok(Node { value, spot })
    }

    /// Named values up to `end`, or up to the end of the file.
    fn entries(&mut self, end: Option<char>, depth: usize) -> Result<Vec<Entry>, Malformed> {
        let mut entries = Vec::new();
        loop {
            self.space()?;
            match (self.peek(), end) {
                (None, None) => return Ok(entries),
                (c, Some(end)) if c == Some(end) => {
                    self.next();
                    return Ok(entries);
                }
                _ => {}
            }
            let spot = self.spot();
            let key = self.name()?;
            self.space()?;
            if !self.eat(':') {
                return Err(self.wrong(&format!("a colon after {key:?}")));
            }
            self.space()?;
            let node = self.value(depth)?;
            entries.push(Entry { key, spot, node });
            self.separator(end, "a name")?;
        }
    }

    fn items(&mut self, depth: usize) -> Result<Vec<Node>, Malformed> {
        let mut items = Vec::new();
        loop {
            self.space()?;
            if self.eat(']') {
                return Ok(items);
            }
            items.push(self.value(depth)?);
            self.separator(Some(']'), "a value")?;
        }
    }

    /// Between two members: a comma, a new line, or the end, which is left there.
    fn separator(&mut self, end: Option<char>, next: &str) -> Result<(), Malformed> {
        let line = self.line;
        self.space()?;
        if self.eat(',') {
            self.space()?;
            return match self.peek() {
                Some(',') => Err(self.wrong(next)),
                _ => Ok(()),
            };
        }
        let ended = match (self.peek(), end) {
            (None, None) => true,
            (Some(c), Some(end)) => c == end,
            _ => false,
        };
        if ended || (self.line > line && self.peek().is_some()) {
            return Ok(());
        }
        let end = end.map_or("the end of the file".to_owned(), |c| format!("{c:?}"));
        Err(self.wrong(&format!("a comma or {end}")))
    }

    fn name(&mut self) -> Result<String, Malformed> {
        if let Some(quote @ ('"' | '\'')) = self.peek() {
            return self.quoted(quote);
        }
        let mut name = String::new();
        while let Some(c) = self.peek().filter(|c| !c.is_whitespace() && !"{}[]:,".contains(*c)) {
            name.push(c);
            self.next();
        }
        if name.is_empty() { Err(self.wrong("a name")) } else { Ok(name) }
    }

    fn quoted(&mut self, quote: char) -> Result<String, Malformed> {
        let start = self.spot();
        let unended =
            || Malformed { spot: start, expected: format!("{quote} at the end of the text"), found: "none".to_owned() };
        self.next();
        if quote == '\'' && self.peek() == Some('\'') {
            self.next();
            return if self.eat('\'') { self.lines(start) } else { Ok(String::new()) };
        }
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(unended()),
                Some(c) if c == quote => {
                    self.next();
                    return Ok(text);
                }
                Some('\\') => {
                    self.next();
                    text.push(self.escaped()?);
                }
                Some(c) => {
                    text.push(c);
                    self.next();
                }
            }
        }
    }

    fn escaped(&mut self) -> Result<char, Malformed> {
        let expected = "one of \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX";
        let c = match self.peek() {
            Some(c @ ('"' | '\'' | '\\' | '/')) => c,
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('u') => {
                self.next();
                return self.unicode();
            }
            _ => return Err(self.wrong(expected)),
        };
        self.next();
        Ok(c)
    }

    /// What follows `\u`: four hexadecimal digits, or two such escapes that are a surrogate pair.
    fn unicode(&mut self) -> Result<char, Malformed> {
        let high = self.four_digits()?;
        if !(0xD800..0xDC00).contains(&high) {
            return char::from_u32(high).ok_or_else(|| self.wrong("a character"));
        }
        if !(self.eat('\\') && self.eat('u')) {
            return Err(self.wrong("the second half of a surrogate pair, \\uDC00 to \\uDFFF"));
        }
        let low = self.four_digits()?;
        let code = (0xDC00..0xE000).contains(&low).then(|| 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00));
        code.and_then(char::from_u32)
            .ok_or_else(|| self.wrong("the second half of a surrogate pair, \\uDC00 to \\uDFFF"))
    }

    fn four_digits(&mut self) -> Result<u32, Malformed> {
        let mut code = 0;
        for _ in 0..4 {
            let digit =
                self.peek().and_then(|c| c.to_digit(16)).ok_or_else(|| self.wrong("four hexadecimal digits"))?;
            self.next();
            code = code * 16 + digit;
        }
        Ok(code)
    }

    /// Text between `'''` and `'''`, without the indentation of its first line.
    fn lines(&mut self, start: Spot) -> Result<String, Malformed> {
        let mut text = String::new();
        while !text.ends_with("'''") {
            let Some(c) = self.next() else {
                let expected = "''' at the end of the text".to_owned();
                return Err(Malformed { spot: start, expected, found: "none".to_owned() });
            };
            text.push(c);
        }
        text.truncate(text.len() - 3);
        let indent = start.column - 1;
        let trimmed = |line: &str| {
            let space = line.chars().take_while(|c| c.is_whitespace()).count().min(indent);
            line.chars().skip(space).collect::<String>()
        };
        let lines: Vec<String> = text.trim_start_matches(' ').lines().map(trimmed).collect();
        Ok(lines.join("\n").trim_matches('\n').to_owned())
    }

    /// A literal, a number, or text up to the end of the line.
    fn quoteless(&mut self) -> Value {
        let mut text = String::new();
        while let Some(c) = self.peek().filter(|c| *c != '\n') {
            // A literal or a number ends where JSON would end it; text goes on to the end of the line.
            if (",]}#\"".contains(c) || text.ends_with('/') || c == '/')
                && let Some(value) = literal(text.trim_end_matches('/').trim_end())
            {
                return value;
            }
            text.push(c);
            self.next();
        }
        let text = text.trim_end();
        literal(text).unwrap_or_else(|| Value::Text(text.to_owned()))
    }
}

fn literal(text: &str) -> Option<Value> {
    match text {
        "null" => Some(Value::Null),
        "true" => Some(Value::Bool(true)),
        "false" => Some(Value::Bool(false)),
        _ => is_number(text).then(|| Value::Number(text.to_owned())),
    }
}

/// Whether a text is a finite number and nothing else, in any of the spellings of JSON, YAML and TOML.
pub(super) fn is_number(text: &str) -> bool {
    let digits = text.trim_start_matches(['+', '-']);
    digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') && text.parse::<f64>().is_ok_and(f64::is_finite)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        parse(text).map_or_else(
            |e| format!("{}:{} {} / {}", e.spot.line, e.spot.column, e.expected, e.found),
            |n| n.to_string(),
        )
    }

    #[test]
    fn json_and_its_extensions() {
        for (text, expected) in [
            (r#"{"a": 1, "b": [true, null, "x\n\u00e9"]}"#, "{\"a\": 1, \"b\": [true, null, \"x\\né\"]}"),
            ("{\n  # why\n  a: 5e8 // here\n  b: 1e-5 /* and */, c: -2\n}", "{\"a\": 5e8, \"b\": 1e-5, \"c\": -2}"),
            ("a: some words, and more\nb: 1.0", "{\"a\": \"some words, and more\", \"b\": 1.0}"),
            ("{\"a\": 1,}", "{\"a\": 1}"),
            ("{a: 'x', b: ''}", "{\"a\": \"x\", \"b\": \"\"}"),
            ("{t:\n  '''\n  one\n    two\n  '''\n}", "{\"t\": \"one\\n  two\"}"),
            (r#"{"s": "\ud83d\ude00"}"#, "{\"s\": \"😀\"}"),
            ("\u{feff}{\"a\": .5}", "{\"a\": .5}"),
            ("{\"a\": 1, \"a\": 2}", "{\"a\": 1, \"a\": 2}"),
            ("{a: http://x.y/z\n}", "{\"a\": \"http://x.y/z\"}"),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn places_are_those_of_names_and_values() {
        let node = parse("{\n  \"é\": {\"b\": 7}\n}").unwrap();
        let entry = &node.entries().unwrap()[0];
        assert_eq!((entry.spot, entry.node.spot), (Spot { line: 2, column: 3 }, Spot { line: 2, column: 8 }));
        let inner = &entry.node.entries().unwrap()[0];
        assert_eq!((inner.spot, inner.node.spot), (Spot { line: 2, column: 9 }, Spot { line: 2, column: 14 }));
    }

    #[test]
    fn faults_are_placed() {
        for (text, expected) in [
            ("", "1:1 a value / the end of the file"),
            ("{\"a\": }", "1:7 a value / '}'"),
            ("{\"a\" 1}", "1:6 a colon after \"a\" / '1'"),
            ("{\"a\": 1 \"b\": 2}", "1:9 a comma or '}' / '\"'"),
            ("{\"a\": 1", "1:8 a comma or '}' / the end of the file"),
            ("{\"a\": \"x\n\"}", "1:7 \" at the end of the text / none"),
            ("{\"a\": \"\\q\"}", "1:9 one of \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX / 'q'"),
            ("{} x", "1:4 nothing more / 'x'"),
            ("{a: 1,, b: 2}", "1:7 a name / ','"),
            ("/* never", "1:1 */ at the end of the comment / none"),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
        assert!(shown(&"[".repeat(100_000)).contains("at most 64 levels"));
    }
}
