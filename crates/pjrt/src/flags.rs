//! `XLA_FLAGS`: a plugin aborts the process when it finds a flag there that it does not know, so the flags are compared
//! with the names in the library before it is loaded.

use std::ffi::OsString;
use std::path::Path;

use crate::error::{Error, Result};

/// Refuses flags whose name does not occur in the library at `path`.
pub(crate) fn check(path: &Path, value: OsString) -> Result<()> {
    if value.is_empty() {
        return Ok(());
    }
    let refused = |reason: String| Error::Environment { name: "XLA_FLAGS".into(), reason };
    let value = value.into_string().map_err(|_| refused("it is not UTF-8".into()))?;
    let text = if value.trim_start().starts_with("--") {
        value
    } else {
        let file = value.trim();
        std::fs::read_to_string(file).map_err(|e| {
            refused(format!("`{file}` neither starts with `--` nor is a readable file of flags ({e})"))
        })?
    };
    let names = names(&text);
    if names.is_empty() {
        return Ok(());
    }
    let library =
        std::fs::read(path).map_err(|e| Error::Load { path: path.to_path_buf(), reason: e.to_string() })?;
    match unknown(&names, &library) {
        Some(name) => Err(refused(format!("`--{name}` is no flag of {}", path.display()))),
        None => Ok(()),
    }
}

/// The names of the flags in a text: words that start with `--`, up to `=`.
fn names(text: &str) -> Vec<&str> {
    let words = text.split_whitespace().filter_map(|w| w.strip_prefix("--"));
    words.map(|w| w.split('=').next().unwrap_or(w)).filter(|n| !n.is_empty()).collect()
}

/// The first name that is no C string in the library.
fn unknown<'a>(names: &[&'a str], library: &[u8]) -> Option<&'a str> {
    names.iter().copied().find(|name| {
        let mut needle = name.as_bytes().to_vec();
        needle.push(0);
        memchr::memmem::find(library, &needle).is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_from_words() {
        assert_eq!(names("--xla_a=1  --xla_b --xla_c=x=y\n--"), ["xla_a", "xla_b", "xla_c"]);
    }

    #[test]
    fn a_name_must_end_where_the_string_ends() {
        let library = b"\0xla_dump_to\0xla_dump_hlo_as_text\0";
        assert_eq!(unknown(&["xla_dump_to", "xla_dump_hlo_as_text"], library), None);
        assert_eq!(unknown(&["xla_dump_to", "xla_dump_hlo"], library), Some("xla_dump_hlo"));
    }
}
