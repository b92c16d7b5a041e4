//! Parameter types read from a module's text, so that launches are checked even when the caller did not say them.

use crate::element::{BufferType, Dims, ElementType};
use crate::guard::{end_of_string, end_of_type};

/// The parameter types of `@main`, or `None` where the text is not in the form that is understood.
pub(crate) fn params(code: &[u8]) -> Option<Vec<BufferType>> {
    let list = parameter_list(code)?;
    split(list).into_iter().map(parse_param).collect()
}

/// What stands between the parentheses after `func.func @main`.
fn parameter_list(code: &[u8]) -> Option<&[u8]> {
    let mut from = 0;
    loop {
        let at = from + memchr::memmem::find(&code[from..], b"@main(")?;
        let before = std::str::from_utf8(&code[at.saturating_sub(32)..at]).ok()?.trim_end();
        let before = before.strip_suffix("public").map_or(before, str::trim_end);
        from = at + b"@main(".len();
        if before.ends_with("func.func") {
            break;
        }
    }
    let (mut depth, mut i) = (1usize, from);
    while i < code.len() {
        match code[i] {
            b'"' => {
                i = end_of_string(code, i);
                continue;
            }
            b'(' | b'{' | b'[' => depth += 1,
            b')' | b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(&code[from..i]);
                }
            }
            _ => {}
        }
        i += 1;
    }
    None
}

/// Splits at commas that are in no bracket, type or string.
fn split(list: &[u8]) -> Vec<&[u8]> {
    let (mut out, mut start, mut depth, mut i) = (Vec::new(), 0, 0usize, 0);
    while i < list.len() {
        match list[i] {
            b'"' => {
                i = end_of_string(list, i);
                continue;
            }
            b'<' => {
                i = end_of_type(list, i);
                continue;
            }
            b'(' | b'{' | b'[' => depth += 1,
            b')' | b'}' | b']' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                out.push(&list[start..i]);
                start = i + 1;
            }
            _ => {}
        }
        i += 1;
    }
    if !list[start..].trim_ascii().is_empty() {
        out.push(&list[start..]);
    }
    out
}

/// `%name: tensor<2x3xf32> {attributes}`.
fn parse_param(param: &[u8]) -> Option<BufferType> {
    let text = std::str::from_utf8(param).ok()?.trim();
    let (name, ty) = text.split_once(':')?;
    let inner = ty.trim().strip_prefix("tensor<")?;
    let end = end_of_type(ty.trim().as_bytes(), "tensor".len()) - "tensor<".len();
    let inner = inner.get(..end - 1)?.trim();
    if !name.starts_with('%') || inner.contains([',', '?', ' ']) {
        return None;
    }
    let mut dims = Dims::new();
    let mut rest = inner;
    while let Some((dim, tail)) = rest.split_once('x') {
        let Ok(dim) = dim.parse() else { break };
        dims.push(dim);
        rest = tail;
    }
    Some(BufferType { dtype: element_type(rest)?, dims })
}

/// An element type by the name that MLIR prints.
fn element_type(name: &str) -> Option<ElementType> {
    let xla = match name {
        "i1" => "pred".into(),
        "complex<f32>" => "c64".into(),
        "complex<f64>" => "c128".into(),
        "token" => return None,
        _ => match (name.strip_prefix("ui"), name.strip_prefix('i')) {
            (Some(bits), _) => format!("u{bits}"),
            (_, Some(bits)) => format!("s{bits}"),
            _ => name.to_ascii_lowercase(),
        },
    };
    ElementType::ALL.iter().copied().find(|t| t.name() == xla)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(list: &str, expected: Option<&[&str]>) {
        let text = format!("module @m {{ func.func public @main({list}) -> tensor<f32> {{ }} }}");
        let got = params(text.as_bytes()).map(|p| p.iter().map(|t| t.to_string()).collect::<Vec<_>>());
        assert_eq!(got, expected.map(|e| e.iter().map(|t| t.to_string()).collect()), "{list}");
    }

    #[test]
    fn lists_are_read() {
        check("", Some(&[]));
        check("%a: tensor<f32>", Some(&["f32[]"]));
        check(
            "%a: tensor<4x0xbf16>, %b : tensor<2xi1> {jax.buffer_donor = true}",
            Some(&["bf16[4,0]", "pred[2]"]),
        );
        check(
            "%a: tensor<2xcomplex<f32>> {mhlo.sharding = \"{devices=[2,1]<=[2]}\"}, %b: tensor<ui8>",
            Some(&["c64[2]", "u8[]"]),
        );
        check(
            "%a: tensor<3xf8E4M3FN>, %b: tensor<i64>, %c: tensor<1xui4>",
            Some(&["f8e4m3fn[3]", "s64[]", "u4[1]"]),
        );
        check("%a: tensor<i32> loc(\"x, y: (\"), %b: tensor<f64>", Some(&["s32[]", "f64[]"]));
    }

    #[test]
    fn what_is_not_understood_is_left_alone() {
        check("%a: !stablehlo.token", None);
        check("%a: tensor<?xf32, #stablehlo.bounds<4>>", None);
        check("%a: tensor<4x!quant.uniform<i8:f32, 1.0>>", None);
        check("tensor<4xf32>", None);
        assert!(params(b"func.func @main(%a: tensor<4xf32>").is_none());
        assert!(params(b"call @main(%a) : (tensor<f32>) -> tensor<f32>").is_none());
        assert!(params(b"").is_none());
    }
}
