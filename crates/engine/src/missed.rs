//! Why the cache folder did not have a program although it has one like it: which parts of the key differ.

use crate::effort::Effort;
use crate::graph::Origin;
use crate::program::{Compiler, Program};
use oxitorch_cache::{Component, Difference, Key, Listed, Maker};
use std::fmt::Write as _;

/// Words that are named on each side.
const NAMED: usize = 3;
/// Texts up to this length are shown whole.
const WHOLE: usize = 60;

impl Compiler {
    /// What the cache folder has instead of a program that had to be compiled.
    pub(crate) fn missed(&self, program: &Program, stored: &[Listed]) -> Option<String> {
        let named = || stored.iter().filter(|e| e.meta.name == program.name);
        named().next()?; // a module has its program's name
        let (graph, module_text, key) = self.made_from(program)?;
        if !matches!(graph.source.origin.get(), Some(Origin::Compiled(_))) {
            return None;
        }
        let (_, task) = program.task()?;
        let (_, notes) = self.build(&program.name, task, module_text.into(), Effort::Full).describe();
        let module = |key: &Key| key.get("module").map(|c| c.digest.clone());
        let near = |e: &&Listed| module(&e.meta.key) == module(&key) || e.meta.notes == notes;
        let nearest = named().filter(near).min_by_key(|e| key.differences(&e.meta.key).len())?;
        let differences = key.differences(&nearest.meta.key);
        (!differences.is_empty()).then(|| text(&differences))
    }

    /// The entries that were in the cache folder when the process started, or many of them.
    pub(crate) fn stored(&self) -> &[Listed] {
        self.programs().stored()
    }
}

fn text(differences: &[Difference<'_>]) -> String {
    let mut out = "the cache folder has it, but not for the same".to_owned();
    for (i, d) in differences.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        // Writing to a String does not fail.
        let _ = write!(out, "{comma} `{}`{}", d.name, sides(d.ours, d.theirs));
    }
    out
}

/// What each side has, if it can be shown.
fn sides(ours: Option<&Component>, theirs: Option<&Component>) -> String {
    let shown = |c: Option<&Component>| c.map_or(Some(String::new()), |c| c.text.clone());
    let (Some(ours), Some(theirs)) = (shown(ours), shown(theirs)) else { return String::new() };
    let (here, there) = if ours.len().max(theirs.len()) <= WHOLE {
        (ours, theirs)
    } else {
        (only(&ours, &theirs), only(&theirs, &ours))
    };
    let or_nothing = |s: String| if s.is_empty() { "nothing".to_owned() } else { s };
    format!(" (here {}, there {})", or_nothing(here), or_nothing(there))
}

/// The words of a long text that another does not have. Compiler options are pairs, which are one word each.
fn only(text: &str, other: &str) -> String {
    let words = |t: &str| -> Vec<String> {
        let pairs = t.contains("), (");
        let separator = if pairs { "), (" } else { " " };
        t.split(separator).map(bare).collect()
    };
    let others = words(other);
    let own: Vec<String> = words(text).into_iter().filter(|w| !others.contains(w)).collect();
    let more = if own.len() > NAMED { format!(" and {} more", own.len() - NAMED) } else { String::new() };
    own[..own.len().min(NAMED)].join(" ") + &more
}

/// A word without the brackets and quotes of what it stood in.
fn bare(word: &str) -> String {
    let mut word = word.trim_start_matches(['(', '[', '"']).replace("\", ", " = ");
    while word.matches(')').count() > word.matches('(').count() || word.ends_with([' ', '}', ']']) {
        word.pop();
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ours: &[(&'static str, &str)], theirs: &[(&'static str, &str)], expected: &str) {
        let key = |parts: &[(&'static str, &str)]| {
            parts.iter().fold(Key::new(), |k, (name, text)| k.with(name, text.as_bytes()))
        };
        let (ours, theirs) = (key(ours), key(theirs));
        let start = "the cache folder has it, but not for the same";
        assert_eq!(text(&ours.differences(&theirs)), format!("{start} {expected}"));
    }

    #[test]
    fn a_version_and_what_came_with_it() {
        let long = "module ".repeat(1000);
        check(
            &[("oxitorch", "0.2.0"), ("module", &long)],
            &[("oxitorch", "0.1.0"), ("module", "module")],
            "`oxitorch` (here 0.2.0, there 0.1.0), `module`",
        );
    }

    #[test]
    fn a_processor_lacks_features() {
        let common = "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov";
        check(
            &[("cpu features", &format!("{common} avx2"))],
            &[("cpu features", &format!("{common} avx2 avx512f avx512bw amx_bf16 amx_tile amx_int8"))],
            "`cpu features` (here nothing, there avx512f avx512bw amx_bf16 and 2 more)",
        );
    }

    #[test]
    fn an_option_has_another_value() {
        let options = |level: u32| {
            format!(
                r#"CompileOptions {{ overrides: [("xla_allow_excess_precision", Bool(false)), ("xla_level", Int({level})), ("c", Bool(true))] }}"#
            )
        };
        check(
            &[("options", &options(1))],
            &[("options", &options(2))],
            "`options` (here xla_level = Int(1), there xla_level = Int(2))",
        );
    }

    #[test]
    fn a_variable_is_not_set() {
        check(
            &[("environment", "[]")],
            &[("environment", r#"[("NPROC", "1")]"#)],
            r#"`environment` (here [], there [("NPROC", "1")])"#,
        );
    }
}
