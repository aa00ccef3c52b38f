//! Indented JSON in which a list of numbers takes one line, however long: rows hold distributions and timelines, and a
//! line for each of their numbers would make ten thousand rows unreadable and three times as large.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// The value as indented JSON, with a newline at its end.
///
/// # Errors
/// A map has keys that are not text, or a number is not finite.
pub(crate) fn indented<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    let mut text = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut text, Indented::default()))?;
    text.push(b'\n');
    Ok(String::from_utf8(text).expect("a serializer of JSON writes text"))
}

/// Objects have a line for each field, lists one for each object in them.
#[derive(Default)]
struct Indented {
    depth: usize,
    /// Whether something stands in the objects and lists that are open, innermost last.
    holds: Vec<Holds>,
}

#[derive(Clone, Copy, PartialEq)]
enum Holds {
    Fields,
    Nothing,
    Values,
    Objects,
}

impl Indented {
    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(b"  "))
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, with: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if matches!(self.holds.pop(), Some(Holds::Fields | Holds::Objects)) {
            self.new_line(writer)?;
        }
        writer.write_all(with)
    }
}

impl Formatter for Indented {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth += 1;
        self.holds.push(Holds::Nothing);
        writer.write_all(b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b"," })
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        if let Some(holds @ Holds::Nothing) = self.holds.last_mut() {
            *holds = Holds::Values;
        }
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        if let Some(holds @ (Holds::Nothing | Holds::Values | Holds::Objects)) = self.holds.last_mut() {
            *holds = Holds::Objects;
            self.new_line(writer)?;
        }
        self.depth += 1;
        self.holds.push(Holds::Nothing);
        writer.write_all(b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if let Some(holds) = self.holds.last_mut() {
            *holds = Holds::Fields;
        }
        writer.write_all(if first { b"" } else { b"," })?;
        self.new_line(writer)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn numbers_stand_side_by_side_and_objects_below_each_other() {
        let value = json!({
            "cells": [{ "depth": 1 }, { "depth": 2, "of": [] }],
            "slots": [[7, [1, 2, 3]], [9, []]],
            "words": ["a\n", null, true],
            "nothing": {},
        });
        let text = indented(&value).unwrap();
        let expected = r#"{
  "cells": [
    {
      "depth": 1
    },
    {
      "depth": 2,
      "of": []
    }
  ],
  "nothing": {},
  "slots": [[7,[1,2,3]],[9,[]]],
  "words": ["a\n",null,true]
}
"#;
        assert_eq!(text, expected);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
        assert_eq!(indented(&json!([{}])).unwrap(), "[\n  {}\n]\n");
    }
}
