//! `oxitorch env`: the table of environment variables with their values.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};
use serde_json::json;

use crate::facts::Facts;

pub(crate) fn json(facts: &Facts) -> serde_json::Result<String> {
    let all = json!({ "variables": facts.env, "foreign": facts.env_foreign });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

pub(crate) fn text(facts: &Facts) -> String {
    let name = AnsiColor::Cyan.on_default().bold();
    let set = AnsiColor::Green.on_default();
    let wrong = AnsiColor::Red.on_default().bold();
    let dim = Style::new().dimmed();
    let mut out = String::new();
    for v in &facts.env {
        let _ = write!(out, "{name}{}{name:#}", v.name);
        match (&v.value, &v.error) {
            (_, Some(error)) => _ = write!(out, "  {wrong}{error}{wrong:#}"),
            (Some(value), None) => _ = write!(out, " = {set}{value}{set:#}"),
            (None, None) => {}
        }
        let _ = writeln!(out, "\n  {}", plain(&v.doc));
        let _ = writeln!(
            out,
            "  {dim}{}; default: {}; since {}{dim:#}\n",
            plain(&v.values),
            plain(&v.default),
            v.since
        );
    }
    for v in &facts.env_foreign {
        let _ = write!(out, "{name}{}{name:#}", v.name);
        if let Some(value) = &v.value {
            let _ = write!(out, " = {set}{value}{set:#}");
        }
        let _ = writeln!(out, "\n  {}\n", plain(&v.doc));
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// Markdown's code marks mean nothing on a terminal.
fn plain(text: &str) -> String {
    text.replace('`', "")
}
