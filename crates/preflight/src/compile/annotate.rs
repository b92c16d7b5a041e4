//! Writes the shardings of arguments and results into a program's text, as Shardy reads them.

use std::fmt::Write;

use anyhow::{Context, bail};

use crate::split::{Mesh, Split, Splits};

/// A program with its shardings.
#[derive(Debug, PartialEq)]
pub(crate) struct Annotated {
    pub(crate) text: String,
    /// For each argument, whether the compiler may choose how it is split.
    pub(crate) open_params: Vec<bool>,
    /// For each result.
    pub(crate) open_outputs: Vec<bool>,
}

/// Puts a mesh before the program's function, and a sharding to each argument and result. A result that overwrites an
/// argument is split as that is.
pub(crate) fn annotate(text: &str, mesh: &Mesh, splits: &Splits) -> anyhow::Result<Annotated> {
    const MAIN: &str = "func.func public @main(";
    let at = text.find(MAIN).context("a program without `main`")?;
    let (arguments, after) = list(&text[at + MAIN.len()..])?;
    let rest = after.strip_prefix(" -> (").context("a program without results")?;
    let (results, body) = list(rest)?;
    let mut splits = splits.clone();
    splits.inputs.resize(arguments.len(), Some(Split::new()));
    // Results after those of operations are checks: numbers.
    splits.outputs.resize(results.len(), Some(Split::new()));
    for (argument, split) in arguments.iter().zip(&splits.inputs) {
        if let Some(result) = aliased(argument) {
            *splits.outputs.get_mut(result).context("an argument for no result")? = split.clone();
        }
    }
    let mut out = String::with_capacity(text.len() + 64 * (arguments.len() + results.len()));
    let axes: Vec<String> = mesh.0.iter().map(|(name, n)| format!("{name:?}={n}")).collect();
    out += &text[..at];
    // Writing to a String does not fail.
    let _ = write!(out, "sdy.mesh @mesh = <[{}]>\n  {MAIN}", axes.join(", "));
    write_list(&mut out, &arguments, &splits.inputs)?;
    out += ") -> (";
    write_list(&mut out, &results, &splits.outputs)?;
    out += ")";
    out += body;
    let open = |all: &[Option<Split>]| all.iter().map(Option::is_none).collect();
    Ok(Annotated { open_params: open(&splits.inputs), open_outputs: open(&splits.outputs), text: out })
}

/// The parts between commas up to the parenthesis that closes, and what comes after it.
fn list(text: &str) -> anyhow::Result<(Vec<&str>, &str)> {
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0usize, false);
    let mut bytes = text.bytes().enumerate();
    while let Some((i, b)) = bytes.next() {
        match b {
            b'\\' if quoted => _ = bytes.next(),
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'(' | b'{' | b'[' | b'<' => depth += 1,
            b'>' if text[..i].ends_with('-') => {} // an arrow
            b')' if depth == 0 => {
                if !text[start..i].trim().is_empty() {
                    parts.push(text[start..i].trim());
                }
                return Ok((parts, &text[i + 1..]));
            }
            b')' | b'}' | b']' | b'>' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    bail!("a list without an end")
}

/// The result that overwrites an argument.
fn aliased(argument: &str) -> Option<usize> {
    let (_, rest) = argument.split_once("tf.aliasing_output = ")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn write_list(out: &mut String, parts: &[&str], splits: &[Option<Split>]) -> anyhow::Result<()> {
    for (i, (part, split)) in parts.iter().zip(splits).enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        let Some(split) = split else {
            out.push_str(part);
            continue;
        };
        let sharding = sharding(split);
        // Behind the type are attributes, if any, and then a location.
        let end = end_of_type(part).context("a value without a type")?;
        let (typed, rest) = part.split_at(end);
        let _ = match rest.trim_start().strip_prefix('{') {
            Some(others) => write!(out, "{typed} {{{sharding}, {others}"),
            None => write!(out, "{typed} {{{sharding}}}{rest}"),
        };
    }
    Ok(())
}

/// Where a tensor's type ends.
fn end_of_type(part: &str) -> Option<usize> {
    let start = part.find("tensor<")?;
    let mut depth = 0;
    for (i, b) in part.bytes().enumerate().skip(start) {
        match b {
            b'<' => depth += 1,
            b'>' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

fn sharding(split: &Split) -> String {
    let dim = |axes: &Vec<String>| {
        let axes: Vec<String> = axes.iter().map(|a| format!("{a:?}")).collect();
        format!("{{{}}}", axes.join(", "))
    };
    let dims: Vec<String> = split.iter().map(dim).collect();
    format!("sdy.sharding = #sdy.sharding<@mesh, [{}]>", dims.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shardings_stand_behind_types() {
        let text = "module @a {\n  func.func public @main(%arg0: tensor<4x8xf32> {tf.aliasing_output = 1 : i32}, \
                    %arg1: tensor<8xcomplex<f32>> loc(\"a, (b\":1:2), %arg2: tensor<i64>) -> (tensor<f32>, tensor<4x8xf32>, tensor<i1>) {\n    body\n  }\n}\n";
        let along = |axes: &[&str]| -> Split {
            axes.iter().map(|a| if a.is_empty() { Vec::new() } else { vec![(*a).to_owned()] }).collect()
        };
        let splits = Splits {
            inputs: vec![Some(along(&["x", ""])), Some(along(&["y"])), Some(Split::new())],
            outputs: vec![None, None],
        };
        let mesh = Mesh(vec![("x".into(), 2), ("y".into(), 4)]);
        let found = annotate(text, &mesh, &splits).unwrap();
        let expected = "module @a {\n  sdy.mesh @mesh = <[\"x\"=2, \"y\"=4]>\n  func.func public @main(\
            %arg0: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{\"x\"}, {}]>, tf.aliasing_output = 1 : i32}, \
            %arg1: tensor<8xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{\"y\"}]>} loc(\"a, (b\":1:2), \
            %arg2: tensor<i64> {sdy.sharding = #sdy.sharding<@mesh, []>}) -> (tensor<f32>, \
            tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{\"x\"}, {}]>}, \
            tensor<i1> {sdy.sharding = #sdy.sharding<@mesh, []>}) {\n    body\n  }\n}\n";
        assert_eq!(found.text, expected);
        assert_eq!((found.open_params, found.open_outputs), (vec![false; 3], vec![true, false, false]));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "func.func public @main(", "func.func public @main() {}"] {
            assert!(annotate(text, &Mesh(Vec::new()), &Splits::default()).is_err(), "{text}");
        }
    }
}
