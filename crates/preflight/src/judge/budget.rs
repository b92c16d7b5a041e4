//! `--budget hbm=90%,graphs=2,syncs=0`: what a step may take, as a gate for continuous integration.

use std::str::FromStr;

use anyhow::{Context, bail};

use crate::answer::{Held, Judged};
use crate::verdict::Verdict;

/// What can be bounded: one row for each.
struct Kind {
    name: &'static str,
    /// What one may write.
    values: &'static str,
    /// What is counted.
    what: &'static str,
    value: fn(&Judged) -> Option<f64>,
}

const KINDS: &[Kind] = &[
    Kind {
        name: "hbm",
        values: "a share such as 90%, or bytes such as 12G",
        what: "memory of a chip",
        value: |s| s.need_bytes.map(|n| n as f64),
    },
    Kind {
        name: "graphs",
        values: "a number",
        what: "distinct programs in all steps",
        value: |s| Some(s.distinct_programs() as f64),
    },
    Kind {
        name: "launches",
        values: "a number",
        what: "launches in a step",
        value: |s| s.step.as_ref().map(|t| t.launches as f64),
    },
    Kind {
        name: "syncs",
        values: "a number",
        what: "host reads in a step",
        value: |s| s.step.as_ref().map(|_| s.host_reads.iter().map(|m| m.count).sum::<u64>() as f64),
    },
    Kind {
        name: "fallbacks",
        values: "a number",
        what: "operations on the CPU in a step",
        value: |s| {
            let last = s.steps_captured.saturating_sub(1);
            let of_last = s.fallbacks.iter().filter(|f| f.step == last);
            s.step.as_ref().map(|_| of_last.map(|f| f.count).sum::<u64>() as f64)
        },
    },
    Kind {
        name: "step_ms",
        values: "milliseconds",
        what: "milliseconds of a step on the roofline",
        value: |s| Some(1e3 * s.step.as_ref()?.work.roofline_s?),
    },
];

/// One limit, as the user wrote it.
#[derive(Clone, Debug)]
pub struct Limit {
    kind: usize,
    most: Most,
}

#[derive(Clone, Copy, Debug)]
enum Most {
    Number(f64),
    /// Of what there is.
    Share(f64),
}

impl FromStr for Limit {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Limit> {
        let names = || KINDS.iter().map(|k| k.name).collect::<Vec<_>>().join(", ");
        let Some((name, value)) = text.split_once('=') else {
            bail!("`{text}` is not a limit: write NAME=VALUE, for instance syncs=0; names are {}", names())
        };
        let kind = KINDS.iter().position(|k| k.name == name.trim());
        let kind =
            kind.with_context(|| format!("nothing is called `{}`; names are {}", name.trim(), names()))?;
        let most = most(KINDS[kind].name, value.trim());
        let most = most.with_context(|| format!("`{name}` takes {}", KINDS[kind].values))?;
        Ok(Limit { kind, most })
    }
}

fn most(name: &str, value: &str) -> Option<Most> {
    let (number, unit) =
        value.split_at(value.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(value.len()));
    let number: f64 = number.parse().ok()?;
    let unit = unit.trim();
    if name != "hbm" {
        return unit.is_empty().then_some(Most::Number(number));
    }
    if unit == "%" {
        return Some(Most::Share(number / 100.0));
    }
    let power = ["", "K", "M", "G", "T"]
        .iter()
        .position(|u| [u.to_string(), format!("{u}iB"), format!("{u}B")].contains(&unit.to_owned()))?;
    Some(Most::Number(number * 1024f64.powi(power as i32)))
}

/// The limits of memory, in bytes, where there is so much.
pub(crate) fn memory(limits: &[Limit], there: u64) -> Vec<u64> {
    let of = |l: &Limit| match l.most {
        Most::Number(n) => n as u64,
        Most::Share(share) => (share * there as f64) as u64,
    };
    limits.iter().filter(|l| KINDS[l.kind].name == "hbm").map(of).collect()
}

/// Holds limits against what was found of a slice.
pub(crate) fn hold(limits: &[Limit], judged: &Judged) -> Vec<Held> {
    let hold = |l: &Limit| {
        let kind = &KINDS[l.kind];
        let limit = match l.most {
            Most::Number(n) => Some(n),
            Most::Share(share) => judged.limit_bytes.map(|b| (share * b as f64).floor()),
        };
        // Of a script that failed, or of which programs are not known, a part of the value is known.
        let value = (kind.value)(judged);
        let whole = judged.verdict != Verdict::Unknown;
        let ok = match limit.zip(value) {
            Some((limit, value)) if value > limit => Some(false),
            Some(_) if whole => Some(true),
            _ => None,
        };
        Held { name: kind.name, limit, value, ok }
    };
    limits.iter().map(hold).collect()
}

/// What is counted for a limit of this name, in words.
pub(crate) fn counted(name: &str) -> &'static str {
    KINDS.iter().find(|k| k.name == name).map_or("", |k| k.what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{Step, held_status as status};
    use crate::hardware::{Slice, Work};

    fn judged() -> Judged {
        let slice = Slice::parse("v5e-1").unwrap();
        let work = Work { roofline_s: Some(0.0125), ..Work::default() };
        let fallbacks = serde_json::json!([{ "step": 0, "line": null, "op": "a", "count": 9 }, { "step": 1, "line": null, "op": "a", "count": 2 }]);
        Judged {
            verdict: Verdict::Fits,
            need_bytes: Some(900),
            limit_bytes: Some(1000),
            steps_captured: 2,
            step: Some(Step { launches: 4, programs: 3, work, ..Step::default() }),
            fallbacks: serde_json::from_value(fallbacks).unwrap(),
            ..Judged::unknown(&slice, String::new())
        }
    }

    fn held(text: &str, judged: &Judged) -> Held {
        hold(&[text.parse().unwrap()], judged).remove(0)
    }

    #[test]
    fn limits_are_held_against_what_was_found() {
        for (text, limit, value, ok) in [
            ("hbm=90%", 900.0, 900.0, true),
            ("hbm=89.9 %", 899.0, 900.0, false),
            ("hbm=1K", 1024.0, 900.0, true),
            ("hbm=899", 899.0, 900.0, false),
            ("graphs=0", 0.0, 0.0, true),
            ("launches=3", 3.0, 4.0, false),
            ("syncs=0", 0.0, 0.0, true),
            ("fallbacks=1", 1.0, 2.0, false),
            ("step_ms=12.5", 12.5, 12.5, true),
        ] {
            let found = held(text, &judged());
            assert_eq!((found.limit, found.value, found.ok), (Some(limit), Some(value), Some(ok)), "{text}");
        }
    }

    #[test]
    fn what_is_not_known_is_no_yes() {
        let part = Judged { verdict: Verdict::Unknown, ..judged() };
        assert_eq!(held("hbm=95%", &part).ok, None);
        // What is too much already stays too much.
        assert_eq!(held("hbm=80%", &part).ok, Some(false));
        let unknown = Judged { step: None, ..judged() };
        let all = [held("step_ms=1", &unknown), held("hbm=95%", &unknown)];
        assert_eq!((all[0].ok, status(&all), status(&all[1..])), (None, 2, 0));
        assert_eq!(status(&[held("hbm=1", &unknown), held("step_ms=1", &unknown)]), 1);
    }

    #[test]
    fn what_is_no_limit_is_said() {
        for (text, said) in [
            ("sync=0", "nothing is called `sync`; names are hbm, graphs, launches, syncs"),
            ("syncs", "`syncs` is not a limit"),
            ("syncs=few", "`syncs` takes a number"),
            ("syncs=90%", "`syncs` takes a number"),
            ("hbm=12Q", "`hbm` takes a share such as 90%"),
        ] {
            let message = text.parse::<Limit>().unwrap_err().to_string();
            assert!(message.contains(said), "{message}");
        }
    }

    #[test]
    fn the_documentation_has_all_names() {
        let page = include_str!("../../../../docs/preflight.md");
        for k in KINDS {
            let row = format!("| `{}` | {} | {} |", k.name, k.values, k.what);
            assert!(page.contains(&row), "docs/preflight.md lacks\n{row}");
        }
    }
}
