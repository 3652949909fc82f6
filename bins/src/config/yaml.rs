//! YAML as a tree of values with places. Plain scalars are read as YAML 1.2 does, so that `no` is text, as Accelerate
//! means it.

use super::hjson::is_number;
use super::node::{Entry, Malformed, Node, Spot, Value};
use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use std::collections::HashMap;

/// Nesting beyond this is refused before it can exhaust the stack.
const MAX_DEPTH: usize = 64;
/// Values, those of aliases counted each time, beyond which a file is refused: it would only be large by repeating itself.
const MAX_NODES: usize = 100_000;

/// Reads a text of one document.
///
/// # Errors
/// Where it leaves the grammar.
pub(super) fn parse(text: &str) -> Result<Node, Malformed> {
    let mut reader = Reader { events: Parser::new_from_str(text), anchors: HashMap::new(), nodes: 0 };
    let mut document = None;
    loop {
        match reader.next()? {
            (Event::StreamEnd, _) => break,
            (Event::DocumentStart(_), span) if document.is_some() => {
                return Err(malformed(span, "one document", "a second one"));
            }
            (Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing, _) => {}
            (event, span) => document = Some(reader.node(event, span, 0)?),
        }
    }
    Ok(document.unwrap_or(Node { value: Value::Null, spot: Spot { line: 1, column: 1 } }))
}

struct Reader<'t> {
    events: Parser<'t, saphyr_parser::StrInput<'t>>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

fn spot(span: Span) -> Spot {
    Spot { line: span.start.line(), column: span.start.col() + 1 }
}

fn malformed(span: Span, expected: &str, found: &str) -> Malformed {
    Malformed { spot: spot(span), expected: expected.to_owned(), found: found.to_owned() }
}

impl<'t> Reader<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Span), Malformed> {
        match self.events.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => {
                let mark = error.marker();
                let spot = Spot { line: mark.line(), column: mark.col() + 1 };
                Err(Malformed { spot, expected: "YAML".to_owned(), found: error.info().to_owned() })
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Node, Malformed> {
        if depth > MAX_DEPTH {
            return Err(malformed(span, &format!("at most {MAX_DEPTH} levels"), "more"));
        }
        self.count(1, span)?;
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, _) => {
                let value = if style == ScalarStyle::Plain { plain(&text) } else { Value::Text(text.into_owned()) };
                (value, anchor)
            }
            Event::SequenceStart(anchor, _) => (Value::List(self.items(depth)?), anchor),
            Event::MappingStart(anchor, _) => (Value::Map(self.entries(depth)?), anchor),
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return Err(malformed(span, "the alias of an earlier anchor", "another"));
                };
                self.count(size(&node), span)?;
                return Ok(Node { spot: spot(span), ..node });
            }
            _ => return Err(malformed(span, "a value", "the end")),
        };
        let node = Node { value, spot: spot(span) };
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn count(&mut self, nodes: usize, span: Span) -> Result<(), Malformed> {
        self.nodes = self.nodes.saturating_add(nodes);
        if self.nodes > MAX_NODES {
            return Err(malformed(span, &format!("at most {MAX_NODES} values"), "more"));
        }
        Ok(())
    }

    fn items(&mut self, depth: usize) -> Result<Vec<Node>, Malformed> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn entries(&mut self, depth: usize) -> Result<Vec<Entry>, Malformed> {
        let mut entries = Vec::new();
        loop {
            let (event, key_span) = self.next()?;
            let key = match event {
                Event::MappingEnd => return Ok(entries),
                Event::Scalar(text, ..) => text.into_owned(),
                _ => return Err(malformed(key_span, "a name", "a list or a table")),
            };
            let (event, span) = self.next()?;
            let node = self.node(event, span, depth + 1)?;
            entries.push(Entry { key, spot: spot(key_span), node });
        }
    }
}

fn size(node: &Node) -> usize {
    let below = match &node.value {
        Value::List(items) => items.iter().map(size).sum(),
        Value::Map(entries) => entries.iter().map(|e| size(&e.node)).sum(),
        _ => 0,
    };
    1 + below
}

fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        _ if is_number(text) => Value::Number(text.to_owned()),
        _ => Value::Text(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        match parse(text) {
            Ok(node) => node.to_string(),
            Err(e) => format!("{}:{} {} / {}", e.spot.line, e.spot.column, e.expected, e.found),
        }
    }

    #[test]
    fn scalars_are_what_they_look_like() {
        let text = "a: no\nb: 'true'\nc: true\nd: 1e-5\ne: 5\nf:\ng: ~\nh: [1, x]\ni: {j: 0.5}\n";
        let expected = r#"{"a": "no", "b": "true", "c": true, "d": 1e-5, "e": 5, "f": null, "g": null, "h": [1, "x"], "i": {"j": 0.5}}"#;
        assert_eq!(shown(text), expected);
        assert_eq!(shown(""), "null");
        assert_eq!(shown("a: &x {b: 1}\nc: *x\n"), r#"{"a": {"b": 1}, "c": {"b": 1}}"#);
    }

    #[test]
    fn places_count_from_one() {
        let node = parse("a: 1\nfsdp_config:\n  fsdp_version: 2\n").unwrap();
        let inner = &node.entries().unwrap()[1].node.entries().unwrap()[0];
        assert_eq!((inner.spot, inner.node.spot), (Spot { line: 3, column: 3 }, Spot { line: 3, column: 17 }));
    }

    #[test]
    fn faults_are_placed_and_growth_is_bounded() {
        assert!(shown("a: [1\nb: 2\n").starts_with("2:"), "{}", shown("a: [1\nb: 2\n"));
        assert_eq!(shown("a: 1\n---\nb: 2\n"), "2:1 one document / a second one");
        assert_eq!(shown("? [a]\n: 1\n"), "1:3 a name / a list or a table");
        let bomb = (1..20).fold("a0: &a0 [x, x, x]\n".to_owned(), |text, i| {
            text + &format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i - 1); 9].join(", "))
        });
        assert!(shown(&bomb).contains("at most 100000 values"));
        assert!(parse(&"[".repeat(100_000)).is_err());
    }
}
