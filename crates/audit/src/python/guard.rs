//! What runs in each step, and what now and then, by the names in loops and tests.

use ruff_python_ast::{Expr, Stmt};
use ruff_text_size::Ranged;

use super::facts::last;
use super::model::{Model, Within};

impl<'a> Model<'a> {
    /// What runs seldom, on one rank, or for float16 alone, by the test of an `if`.
    pub(crate) fn guard(&self, test: &Expr) -> Option<Within<'a>> {
        if let Expr::Name(name) = test
            && self.binding(name.id.as_str()).is_some_and(|b| b.seldom)
        {
            return Some(Within::Seldom);
        }
        let text = self.source(test.range());
        let words = text.to_ascii_lowercase();
        let has = |list: &[&str]| list.iter().any(|w| words.contains(w));
        if text.contains('%')
            || has(&[
                "interval",
                "should_log",
                "every",
                "debug",
                "verbose",
                "log_step",
                "logging_step",
                "is_last",
                "last_step",
                "final_step",
                "do_log",
            ])
        {
            return Some(Within::Seldom);
        }
        let rank = has(&[
            "rank",
            "is_main",
            "is_master",
            "master_process",
            "main_process",
            "is_primary",
            "is_world_process_zero",
        ]);
        if rank && !has(&["!=", "not ", "> 0", ">= 0", "world_size", "none", "-1"]) {
            return Some(Within::OneRank);
        }
        let words = words.replace("bfloat16", "").replace("bf16", "");
        ["float16", "fp16", "half"].iter().any(|w| words.contains(w)).then_some(Within::Half)
    }
}

/// Names that a body assigns more than once, on whatever branches.
pub(crate) fn assigned_again(body: &[Stmt]) -> Vec<&str> {
    fn collect<'a>(body: &'a [Stmt], names: &mut Vec<&'a str>) {
        for stmt in body {
            match stmt {
                Stmt::Assign(assign) => names.extend(assign.targets.iter().filter_map(|t| match t {
                    Expr::Name(name) => Some(name.id.as_str()),
                    _ => None,
                })),
                Stmt::If(tested) => {
                    collect(&tested.body, names);
                    tested.elif_else_clauses.iter().for_each(|c| collect(&c.body, names));
                }
                Stmt::With(with) => collect(&with.body, names),
                _ => {}
            }
        }
    }
    let mut names = Vec::new();
    collect(body, &mut names);
    names.sort_unstable();
    let mut again: Vec<&str> = names.windows(2).filter(|w| w[0] == w[1]).map(|w| w[0]).collect();
    again.dedup();
    again
}

/// Whether an expression names a loader of data.
pub(crate) fn is_loader(expr: &Expr) -> bool {
    let expr = match expr {
        Expr::Subscript(s) => &s.value,
        other => other,
    };
    last(expr).is_some_and(|n| {
        let n = n.to_ascii_lowercase();
        n.ends_with("loader") || n.ends_with("_dl") || n.ends_with("train_iter") || n.ends_with("dataloaders")
    })
}

/// Whether a loop goes over a loader, whatever is wrapped around it.
pub(crate) fn is_over_batches(iter: &Expr) -> bool {
    match iter {
        Expr::Call(call) => call.arguments.args.iter().any(is_over_batches),
        other => is_loader(other),
    }
}
