//! The rules, by families.

#![allow(clippy::needless_update, reason = "a row names what differs from others, be that all there is")]

use std::sync::LazyLock;

use crate::rule::{Family, Rule};

pub(crate) mod control;
pub(crate) mod data;
pub(crate) mod devices;
pub(crate) mod distributed;
pub(crate) mod memory;
pub(crate) mod performance;
pub(crate) mod precision;
pub(crate) mod reading;
pub(crate) mod shapes;
pub(crate) mod syncs;

/// All families, in the order in which they are shown.
pub fn families() -> &'static [&'static Family] {
    static ALL: [&Family; 10] = [
        &devices::FAMILY,
        &syncs::FAMILY,
        &shapes::FAMILY,
        &control::FAMILY,
        &memory::FAMILY,
        &precision::FAMILY,
        &distributed::FAMILY,
        &performance::FAMILY,
        &data::FAMILY,
        &reading::FAMILY,
    ];
    &ALL
}

/// All rules.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    families().iter().flat_map(|f| f.rules)
}

/// The rule of an id, whatever the case of its letters.
pub fn by_id(id: &str) -> Option<&'static Rule> {
    all().find(|r| r.id.eq_ignore_ascii_case(id))
}

/// The family of a rule.
pub fn family(rule: &Rule) -> &'static Family {
    static PREFIXES: LazyLock<Vec<(&str, &Family)>> =
        LazyLock::new(|| families().iter().map(|f| (f.prefix, *f)).collect());
    let of = |(prefix, _): &&(&str, &Family)| rule.id.starts_with(prefix);
    PREFIXES.iter().find(of).map_or(&reading::FAMILY, |(_, f)| f)
}

/// Whether a name is in a list in which `*` at the end of an entry stands for any end.
pub(crate) fn listed(list: &[&str], name: &str) -> bool {
    list.iter().any(|entry| match entry.strip_suffix('*') {
        Some(begin) => name.starts_with(begin),
        None => *entry == name,
    })
}
