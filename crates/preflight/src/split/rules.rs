//! A file of patterns that says how parameters are split, in TOML.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use serde::Deserialize;

use oxitorch_capture::{Capture, Role};

use super::mesh::{Mesh, Split};

/// What the file says.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) mesh: Mesh,
    /// The axes along which the batch is split.
    pub(crate) batch: Vec<String>,
    /// Parameters that no pattern fits are split along this axis by their largest dimension; none: they are whole.
    pub(crate) rest: Option<String>,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    /// A pattern of names, in which `*` stands for anything.
    parameter: String,
    /// An axis for each dimension, or nothing.
    dims: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    mesh: toml::Table,
    batch: Option<Vec<String>>,
    rest: Option<String>,
    #[serde(default)]
    split: Vec<Rule>,
}

impl Rules {
    pub(crate) fn read(file: &Path) -> anyhow::Result<Rules> {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        Self::parse(&text).with_context(|| format!("{}", file.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Rules> {
        let file: File = toml::from_str(text)?;
        let size = |(name, n): (&String, &toml::Value)| match n.as_integer() {
            Some(n) if n > 0 => Ok((name.clone(), n as u64)),
            _ => bail!("mesh axis `{name}` wants a number of devices"),
        };
        let mesh = Mesh(file.mesh.iter().map(size).collect::<anyhow::Result<_>>()?);
        let known = |axis: &String| mesh.0.iter().any(|(name, _)| name == axis);
        let named = || mesh.0.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        let dims = file.split.iter().flat_map(|r| &r.dims).filter(|d| !d.is_empty());
        let axes = dims.chain(file.batch.iter().flatten()).chain(&file.rest);
        if let Some(axis) = axes.into_iter().find(|a| !known(a)) {
            bail!("`{axis}` is no axis of the mesh; those are {}", named());
        }
        let Some((first, _)) = mesh.0.first() else { bail!("the mesh has no axes") };
        let data = mesh.0.iter().find(|(name, _)| name == "data").map_or(first, |(name, _)| name);
        Ok(Rules {
            batch: file.batch.unwrap_or_else(|| vec![data.clone()]),
            mesh,
            rest: file.rest,
            rules: file.split,
        })
    }

    /// How a parameter of this name is split, by the first pattern that fits; what has another number of dimensions, or
    /// dimensions that do not divide, is whole.
    pub(crate) fn of(&self, name: &str, shape: &[u64]) -> Option<Split> {
        let rule = self.rules.iter().find(|r| fits(&r.parameter, name))?;
        let size = |axis: &String| self.mesh.0.iter().find(|(n, _)| n == axis).map_or(1, |(_, n)| *n);
        let divides = |(axis, n): (&String, &u64)| axis.is_empty() || n % size(axis) == 0;
        let can = rule.dims.len() == shape.len() && rule.dims.iter().zip(shape).all(divides);
        let of = |axis: &String| if can && !axis.is_empty() { vec![axis.clone()] } else { Vec::new() };
        let none = String::new();
        Some((0..shape.len()).map(|d| of(rule.dims.get(d).unwrap_or(&none))).collect())
    }

    /// What is said of patterns that split nothing.
    pub(crate) fn unused(&self, capture: &Capture) -> Vec<String> {
        let parameters: Vec<(&str, &[u64])> = capture
            .programs
            .iter()
            .flat_map(|p| &p.inputs)
            .filter(|i| i.label.role == Role::Parameter)
            .filter_map(|i| Some((i.label.name.as_deref()?, i.r#type.shape.as_slice())))
            .collect();
        let mut out = Vec::new();
        for rule in &self.rules {
            let fitting = parameters.iter().filter(|(name, _)| fits(&rule.parameter, name));
            let mut fitting = fitting.peekable();
            let pattern = &rule.parameter;
            if fitting.peek().is_none() {
                out.push(format!("no parameter fits the pattern `{pattern}`"));
                continue;
            }
            let wants = rule.dims.iter().any(|d| !d.is_empty());
            let is_whole = |s: Split| s.iter().all(Vec::is_empty);
            if let Some((name, shape)) =
                fitting.find(|(name, shape)| wants && self.of(name, shape).is_some_and(is_whole))
            {
                out.push(format!("`{name}` of {shape:?} cannot be split as `{pattern}` says, and is whole"));
            }
        }
        out
    }
}

/// Whether a name fits a pattern, in which `*` stands for anything.
fn fits(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let (between, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(mut name) = name.strip_prefix(start).and_then(|n| n.strip_suffix(end)) else { return false };
    // The first place where each part stands leaves most for the next ones.
    between.split('*').all(|part| {
        let found = name.split_once(part);
        found.inspect(|(_, rest)| name = rest).is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        rest = "data"

        [mesh]
        data = 4
        model = 2

        [[split]]
        parameter = "blocks.*.up.weight"
        dims = ["model", ""]

        [[split]]
        parameter = "*.bias"
        dims = [""]
    "#;

    #[test]
    fn the_first_pattern_that_fits_counts() {
        let rules = Rules::parse(TEXT).unwrap();
        assert_eq!(rules.mesh.devices(), 8);
        assert_eq!((rules.batch.as_slice(), rules.rest.as_deref()), (&["data".to_owned()][..], Some("data")));
        let model = vec![vec!["model".to_owned()], Vec::new()];
        let whole = vec![Vec::new(), Vec::new()];
        assert_eq!(rules.of("blocks.11.up.weight", &[8, 3]), Some(model));
        assert_eq!(rules.of("blocks.11.up.weight", &[7, 3]), Some(whole));
        assert_eq!(rules.of("norm.bias", &[8]), Some(vec![Vec::new()]));
        assert_eq!(rules.of("head.weight", &[8, 8]), None);
    }

    #[test]
    fn mistakes_are_named() {
        for (old, new, said) in [
            ("\"model\", \"\"", "\"odd\", \"\"", "`odd` is no axis of the mesh; those are data, model"),
            ("model = 2", "model = 0", "mesh axis `model` wants a number of devices"),
            ("dims", "dimensions", "unknown field"),
        ] {
            let error = format!("{:#}", Rules::parse(&TEXT.replace(old, new)).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, name, expected) in [
            ("a.*.c", "a.b.c", true),
            ("a.*.c", "a.c", false),
            ("*", "x", true),
            ("a", "ab", false),
            ("*b*", "abc", true),
            ("a*a", "a", false),
            ("*a*b*b", "cabcb", true),
            ("*a*b*b", "cacb", false),
            ("**", "", true),
            (&"*a".repeat(64), &"a".repeat(63), false),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }
}
