//! What must not reach a plugin's compiler: unbounded dynamic dimensions, which abort libtpu.

use crate::error::{Result, err};
use crate::platform::Platform;

/// Refuses a module whose text has a `?` dimension, except a bounded one where the platform takes those.
pub(crate) fn dynamic_dims(code: &[u8], platform: Platform) -> Result<()> {
    if code.starts_with(b"ML\xefR") || memchr::memchr(b'?', code).is_none() {
        return Ok(());
    }
    let bounded_ok = platform != Platform::Cpu;
    match first_dynamic(code, bounded_ok) {
        Some(ty) => Err(err::invalid(format!(
            "compile: `{ty}` has a dynamic dimension{}",
            if bounded_ok { " without a bound" } else { "" }
        ))),
        None => Ok(()),
    }
}

/// The first `tensor<...>` with a `?` dimension, outside strings and comments.
fn first_dynamic(code: &[u8], bounded_ok: bool) -> Option<String> {
    let mut i = 0;
    while i < code.len() {
        match code[i] {
            b'"' => i = end_of_string(code, i),
            b'/' if code.get(i + 1) == Some(&b'/') => {
                i = memchr::memchr(b'\n', &code[i..]).map_or(code.len(), |n| i + n);
            }
            b't' if code[i..].starts_with(b"tensor<") => {
                let start = i;
                i = end_of_type(code, i + b"tensor".len());
                let ty = &code[start..i];
                if is_dynamic(ty, bounded_ok) {
                    return Some(String::from_utf8_lossy(ty).into_owned());
                }
            }
            _ => i += 1,
        }
    }
    None
}

/// The index after the string that begins at `start`.
pub(crate) fn end_of_string(code: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < code.len() && code[i] != b'"' {
        i += if code[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(code.len())
}

/// The index after the `>` that closes the `<` at `open`.
pub(crate) fn end_of_type(code: &[u8], open: usize) -> usize {
    let mut depth = 0usize;
    let mut i = open;
    while i < code.len() {
        match code[i] {
            b'<' => depth += 1,
            b'>' => {
                depth -= 1;
                if depth == 0 {
                    return i + 1;
                }
            }
            b'"' => {
                i = end_of_string(code, i);
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    code.len()
}

/// Whether a `tensor<dims x type, encoding>` has a `?` dimension (with `bounded_ok`: one that has no bound).
fn is_dynamic(ty: &[u8], bounded_ok: bool) -> bool {
    let text = String::from_utf8_lossy(ty);
    let inner = text.trim_start_matches("tensor<").trim_end_matches('>');
    let (shape, encoding) = inner.split_once(',').unwrap_or((inner, ""));
    let dims: Vec<bool> = shape.split('x').map(|d| d.trim() == "?").collect();
    if !dims.contains(&true) {
        return false;
    }
    let Some((_, bounds)) = encoding.split_once("bounds<") else { return true };
    let bounds = bounds.split('>').next().unwrap_or_default();
    let bounds: Vec<bool> = bounds.split(',').map(|b| b.trim().parse::<i64>().is_ok()).collect();
    let all_bounded = dims.iter().enumerate().all(|(i, dynamic)| !dynamic || bounds.get(i) == Some(&true));
    !(bounded_ok && all_bounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn question_marks_in_types_are_found() {
        let found = |text: &str, bounded_ok| first_dynamic(text.as_bytes(), bounded_ok);
        assert_eq!(found("%0 : tensor<?x3xf32>", true).as_deref(), Some("tensor<?x3xf32>"));
        assert_eq!(found("loc(\"what?\") tensor<2xf32> // tensor<?xf32>\n", false), None);
        assert_eq!(found("name = \"tensor<?xf32>\" : tensor<f32>", false), None);
        assert_eq!(found("\"a\\\"tensor<?xf32>\" : tensor<f32>", false), None);
        assert!(found("// c\ntensor<2x?x!quant<i8>>", false).is_some());
        assert!(found("tensor<", false).is_none());
        assert!(found("tensor<2x?", false).is_some());
    }

    #[test]
    fn bounds_count_dimension_by_dimension() {
        let bounded = "tensor<?x3xf32, #stablehlo.bounds<4, ?>>";
        assert!(first_dynamic(bounded.as_bytes(), false).is_some());
        assert!(first_dynamic(bounded.as_bytes(), true).is_none());
        assert!(first_dynamic(b"tensor<?x?xf32, #stablehlo.bounds<4, ?>>", true).is_some());
        let long = "#stablehlo.type_extensions<bounds = [4]>";
        assert!(first_dynamic(format!("tensor<?xf32, {long}>").as_bytes(), true).is_some());
    }
}
