//! Each rule finds what its examples say, and all of them hold to what a rule is.

use std::collections::BTreeSet;

use oxitorch_audit::{Example, Rule, Settings, Severity, families, findings, rules};

/// The rules that strike in an example.
fn found(example: &Example) -> BTreeSet<&'static str> {
    let (name, text) = match example {
        Example::Py(text) => ("example.py", *text),
        Example::File(name, text) => (*name, *text),
    };
    findings(name, text, &Settings::default()).iter().map(|f| f.rule).collect()
}

#[test]
fn each_rule_finds_what_it_says() {
    let mut wrong = Vec::new();
    for rule in rules() {
        assert!(!rule.bad.is_empty() && !rule.good.is_empty(), "{} has no examples", rule.id);
        for example in rule.bad.iter().filter(|e| !found(e).contains(rule.id)) {
            wrong.push(format!("{} finds nothing in {example:?}: {:?}", rule.id, found(example)));
        }
        for example in rule.good.iter().filter(|e| found(e).contains(rule.id)) {
            wrong.push(format!("{} finds something in {example:?}", rule.id));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_rule_is_an_error_where_it_has_to_be_changed() {
    for Rule { id, severity, fix, sentence, explanation, name, .. } in rules() {
        let rule = oxitorch_audit::by_id(id).unwrap();
        assert_eq!(*severity == Severity::Error, !rule.unchanged(), "{id}");
        for text in [fix, explanation] {
            assert!(text.ends_with('.'), "{id}: {text}");
        }
        assert!(sentence.contains("{}") && !name.is_empty(), "{id}");
    }
}

#[test]
fn ids_are_unique_and_follow_their_family() {
    let mut ids = BTreeSet::new();
    for family in families() {
        for (i, rule) in family.rules.iter().enumerate() {
            assert_eq!(rule.id, format!("{}{:03}", family.prefix, i + 1));
            assert!(ids.insert(rule.id));
        }
    }
    assert!(ids.len() >= 60, "{}", ids.len());
}
