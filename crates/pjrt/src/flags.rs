//! `XLA_FLAGS`: a plugin aborts the process when it finds a flag there that it does not know, or a value that it cannot
//! read. So the flags are compared, before a library is loaded, with what the library's bytes say about them: the names
//! of flags are C strings there, and most flags are fields of the message `DebugOptions`, whose descriptor (names and
//! types of fields) is in every library.

use std::ffi::OsString;
use std::path::Path;

use memchr::memmem;

use crate::error::{Error, Result};

/// Refuses flags that would make the library at `path` abort.
pub(crate) fn check(path: &Path, value: OsString) -> Result<()> {
    let refused = |reason: String| Error::Environment { name: "XLA_FLAGS".into(), reason };
    let value = value.into_string().map_err(|_| refused("it is not UTF-8".into()))?;
    if value.is_empty() {
        return Ok(());
    }
    // Any other text, blank too, is the name of a file to a plugin.
    let text = if value.starts_with("--") {
        value
    } else {
        std::fs::read_to_string(&value).map_err(|e| {
            refused(format!("`{value}` neither starts with `--` nor is a readable file of flags ({e})"))
        })?
    };
    let flags = flags(&text);
    if flags.is_empty() {
        return Ok(());
    }
    let library =
        std::fs::read(path).map_err(|e| Error::Load { path: path.to_path_buf(), reason: e.to_string() })?;
    match flags.iter().find_map(|flag| problem(flag, &library)) {
        Some(problem) => Err(refused(format!("{problem} (of {})", path.display()))),
        None => Ok(()),
    }
}

/// A flag's name, and its value if it has one.
type Flag = (String, Option<String>);

/// The words of a text that start with `--`; other words are ignored, as plugins do. Quotes group and are dropped.
fn flags(text: &str) -> Vec<Flag> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in text.chars() {
        match quote {
            Some(q) if c == q => quote = None,
            None if c == '"' || c == '\'' => quote = Some(c),
            None if c.is_whitespace() => words.push(String::new()),
            _ => words.last_mut().unwrap_or(&mut String::new()).push(c),
        }
    }
    let flags = words.iter().filter_map(|w| w.strip_prefix("--")).filter(|w| !w.is_empty());
    flags
        .map(|w| match w.split_once('=') {
            Some((name, value)) => (name.to_string(), Some(value.to_string())),
            None => (w.to_string(), None),
        })
        .collect()
}

/// What is wrong with a flag, if anything is known to be.
fn problem((name, value): &Flag, library: &[u8]) -> Option<String> {
    let c_string = [name.as_bytes(), b"\0"].concat();
    if memmem::find(library, &c_string).is_none() {
        return Some(format!("`--{name}` is no flag"));
    }
    let kind = field_kind(name, library)?;
    let Some(value) = value else {
        return (kind != Kind::Bool).then(|| format!("`--{name}` needs a value"));
    };
    let (good, expected) = match kind {
        Kind::Bool => {
            (matches!(&*value.to_ascii_lowercase(), "true" | "false" | "0" | "1"), "`true` or `false`")
        }
        Kind::Int32 => (value.trim().parse::<i32>().is_ok(), "a 32-bit integer"),
        Kind::Int64 => (value.trim().parse::<i64>().is_ok(), "an integer"),
        Kind::Float => (value.trim().parse::<f64>().is_ok(), "a number"),
        Kind::Enum => (is_enumerator(value, library), "one of its enumerators"),
        Kind::String | Kind::Other => (true, ""),
    };
    (!good).then(|| format!("`--{name}={value}`: expected {expected}"))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Bool,
    Int32,
    Int64,
    Float,
    String,
    Enum,
    /// Repeated fields and messages: the flag has a syntax of its own.
    Other,
}

/// The type of the field of `DebugOptions` that a flag sets, from its `FieldDescriptorProto`: name (1), number (3),
/// label (4), type (5), in this order.
fn field_kind(name: &str, library: &[u8]) -> Option<Kind> {
    let head = [&[0x0a, u8::try_from(name.len()).ok()?], name.as_bytes(), &[0x18]].concat();
    let rest = &library[memmem::find(library, &head)? + head.len()..];
    let number_bytes = rest.iter().take(5).position(|b| b & 0x80 == 0)? + 1;
    let &[0x20, label, 0x28, ty] = rest.get(number_bytes..number_bytes + 4)? else { return None };
    const REPEATED: u8 = 3;
    Some(match ty {
        _ if label == REPEATED => Kind::Other,
        1 | 2 => Kind::Float,
        3 => Kind::Int64,
        5 => Kind::Int32,
        8 => Kind::Bool,
        9 => Kind::String,
        14 => Kind::Enum,
        _ => Kind::Other,
    })
}

/// Whether some enumerator's name (field 1 of `EnumValueDescriptorProto`, before the number, field 2) ends so.
fn is_enumerator(value: &str, library: &[u8]) -> bool {
    let tail = [value.to_ascii_uppercase().as_bytes(), &[0x10]].concat();
    tail.len() > 1 && memmem::find(library, &tail).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_taken_from_words() {
        let got = flags("--xla_a=1  --xla_b word --xla_c=x=y\n-- '--xla_d=a --b'");
        let expected =
            [("xla_a", Some("1")), ("xla_b", None), ("xla_c", Some("x=y")), ("xla_d", Some("a --b"))];
        let expected = expected.map(|(n, v)| (n.to_string(), v.map(str::to_string)));
        assert_eq!(got, expected);
    }

    #[test]
    fn names_and_values_are_compared_with_the_library() {
        let mut library = b"\0xla_on\0xla_level\0xla_dump_to\0xla_mode\0xla_list\0xla_odd\0".to_vec();
        let field = |name: &str, label, ty| {
            [&[0x0a, name.len() as u8], name.as_bytes(), &[0x18, 0xf8, 0x02, 0x20, label, 0x28, ty]].concat()
        };
        library.extend(field("xla_on", 1, 8));
        library.extend(field("xla_level", 1, 5));
        library.extend(field("xla_dump_to", 1, 9));
        library.extend(field("xla_mode", 1, 14));
        library.extend(field("xla_list", 3, 14));
        library.extend(b"\x0a\x09MODE_FAST\x10\x01");
        let check = |text: &str| flags(text).iter().find_map(|f| problem(f, &library));
        for good in [
            "--xla_on",
            "--xla_on=true",
            "--xla_on=0",
            "--xla_level=-3",
            "--xla_dump_to=",
            "--xla_mode=MODE_FAST",
            "--xla_mode=fast",
            "--xla_list=+a,-b",
            "--xla_odd=anything",
        ] {
            assert_eq!(check(good), None, "{good}");
        }
        for bad in [
            "--xla_o",
            "--xla_onn",
            "--xla_on=perhaps",
            "--xla_on=",
            "--xla_level",
            "--xla_level=1.5",
            "--xla_level=99999999999",
            "--xla_dump_to",
            "--xla_mode=slow",
            "--xla_mode=",
        ] {
            assert!(check(bad).is_some(), "{bad}");
        }
    }
}
