//! The rules by what they look at, made once.

use std::sync::LazyLock;

use rustc_hash::FxHashMap;

use crate::rule::{Rule, When};
use crate::rules;

/// A rule and one of its matchers.
pub(super) type Entry = (&'static Rule, &'static When);

/// The rules by what they look at.
#[derive(Default)]
pub(super) struct Table {
    pub(super) names: FxHashMap<&'static str, Vec<Entry>>,
    /// Names of which all below is meant too.
    pub(super) below: FxHashMap<&'static str, Vec<Entry>>,
    pub(super) calls: FxHashMap<&'static str, Vec<Entry>>,
    pub(super) methods: FxHashMap<&'static str, Vec<Entry>>,
    pub(super) attributes: FxHashMap<&'static str, Vec<Entry>>,
    pub(super) keywords: FxHashMap<&'static str, Vec<Entry>>,
    pub(super) variables: Vec<Entry>,
    pub(super) texts: Vec<Entry>,
    pub(super) truths: Vec<Entry>,
    pub(super) indices: Vec<Entry>,
    pub(super) statements: Vec<Entry>,
}

/// The one table.
pub(super) static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut t = Table::default();
    for rule in rules::all() {
        for when in rule.when {
            let entry = (rule, when);
            let put = |map: &mut FxHashMap<&'static str, Vec<Entry>>, name: &'static str| {
                map.entry(name).or_default().push(entry);
            };
            match when {
                When::Name(names) => {
                    for name in *names {
                        match name.strip_suffix(".*") {
                            Some(name) => put(&mut t.below, name),
                            None => put(&mut t.names, name),
                        }
                    }
                }
                When::Call(names, _) => names.iter().for_each(|n| put(&mut t.calls, n)),
                When::Method(names, _) => names.iter().for_each(|n| put(&mut t.methods, n)),
                When::Attribute(names, _) => names.iter().for_each(|n| put(&mut t.attributes, n)),
                When::Keyword(names, _) => names.iter().for_each(|n| put(&mut t.keywords, n)),
                When::Variable(_) => t.variables.push(entry),
                When::Text(_) => t.texts.push(entry),
                When::Truth(_) => t.truths.push(entry),
                When::Index(_) => t.indices.push(entry),
                When::Statement(_) => t.statements.push(entry),
                _ => {}
            }
        }
    }
    t
});
