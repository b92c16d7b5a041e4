//! Every row against PyTorch's own schemas.

use oxitorch_aten::args::ParamKind;
use oxitorch_aten::{Form, Schema, bind, find, rows};
use std::collections::BTreeMap;

struct Known {
    schema: Schema,
    implicit: bool,
    view: bool,
}

fn schemas() -> BTreeMap<String, Known> {
    include_str!("../schemas.txt")
        .lines()
        .filter(|l| !l.starts_with('#'))
        .map(|line| {
            let (tags, text) = line.split_once('|').expect(line);
            let schema = Schema::parse(text).expect(line);
            let tag = |t| tags.trim().split(',').any(|x| x == t);
            (
                schema.name(),
                Known { implicit: tag("implicit") && !tag("explicit"), view: tag("view"), schema },
            )
        })
        .collect()
}

#[test]
fn every_row_is_an_overload_that_reaches_the_device() {
    let schemas = schemas();
    let mut wrong = Vec::new();
    // Ops of other libraries have a namespace, and no schema here.
    for (_, row) in rows().filter(|(_, r)| !r.internal && !r.name.contains("::")) {
        let Some(known) = schemas.get(row.name) else {
            wrong.push(format!("{}: no such overload", row.name));
            continue;
        };
        if known.implicit != row.composite.is_some() {
            wrong.push(format!(
                "{}: composite is {}, the row says {:?}",
                row.name, known.implicit, row.composite
            ));
        }
        if known.view {
            wrong.push(format!("{}: is a view", row.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn parameters_are_the_schema() {
    let schemas = schemas();
    let mut wrong = Vec::new();
    for (_, row) in rows() {
        let Some(known) = schemas.get(row.name) else { continue };
        if bind(&known.schema).is_none() {
            let takes: Vec<_> = row.params().iter().map(|p| format!("{p:?}")).collect();
            let has: Vec<_> = known.schema.args.iter().map(|a| format!("{} {}", a.ty, a.name)).collect();
            wrong.push(format!("{}\n  row    {}\n  schema {}", row.name, takes.join(", "), has.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Floats are operands, as each new one would be a new program, but for those that are another formula.
#[test]
fn floats_that_make_a_program() {
    const FORMULAS: &[&str] = &[
        "p", // the exponent of a norm, a distance or a margin
        "ord",
        "norm_type",
        "scales", // sizes over sizes, from which the weights of neighbours come; so are the next three
        "scales_d",
        "scales_h",
        "scales_w",
    ];
    let mut wrong = Vec::new();
    for (name, known) in schemas() {
        let Some(row) = find(&name).map(oxitorch_aten::row) else { continue };
        for (param, argument) in row.params().iter().zip(&known.schema.args) {
            let float = matches!(argument.ty.trim_end_matches('?'), "float" | "Scalar" | "float[]");
            if float && !FORMULAS.contains(&argument.name.as_str()) && param.kind == ParamKind::Attr {
                wrong.push(format!("{name}: {} {}", argument.ty, argument.name));
            }
        }
    }
    // Ops of other libraries have no schema here, and no formulas.
    for (_, row) in rows().filter(|(_, r)| r.name.contains("::")) {
        let float = |p: &&oxitorch_aten::params::Param| (p.accepts)("float") && p.kind == ParamKind::Attr;
        wrong.extend(row.params().iter().filter(float).map(|_| row.name.to_owned()));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn sizes_come_from_rows_with_the_same_parameters() {
    for (_, row) in rows() {
        let Some(name) = row.sized_by else { continue };
        let count = oxitorch_aten::row(find(name).unwrap_or_else(|| panic!("{name} is no row")));
        let types = |r: &oxitorch_aten::Row| r.params().iter().map(|p| (p.rust)()).collect::<Vec<_>>();
        let (mut want, got) = (types(row), types(count));
        assert_eq!(want.pop(), Some("i64"), "{}", row.name);
        assert_eq!(want, got, "{} and {name}", row.name);
        assert!(count.internal, "{name} is an overload");
    }
}

#[test]
fn names_are_unique() {
    let mut seen = BTreeMap::new();
    for (id, row) in rows() {
        assert_eq!(seen.insert(row.name, id), None, "{} has two rows", row.name);
        assert_eq!(find(row.name), Some(id));
    }
}

/// An overload must not be served by a row that consumes a generator it does not have, and so on: `bind` on all of torch.
#[test]
fn derived_forms() {
    let schemas = schemas();
    let check = |name: &str, row: Option<&str>, form: Option<Form>| {
        let binding = bind(&schemas[name].schema);
        assert_eq!(binding.as_ref().map(|b| oxitorch_aten::row(b.op).name), row, "{name}");
        if let Some(form) = form {
            assert_eq!(binding.map(|b| b.form), Some(form), "{name}");
        }
    };
    check("add_.Tensor", Some("add.Tensor"), Some(Form::InPlace(0)));
    check("add.out", Some("add.Tensor"), Some(Form::Out(vec![3])));
    check("pow.Tensor_Scalar_out", Some("pow.Tensor_Scalar"), Some(Form::Out(vec![2])));
    check("pow_.Tensor", Some("pow.Tensor_Tensor"), Some(Form::InPlace(0)));
    check("normal_", Some("normal_functional"), Some(Form::InPlace(0)));
    check("_foreach_add.List", Some("add.Tensor"), None);
    check("_foreach_add_.Scalar", Some("add.Scalar"), None);
    check("_foreach_addcmul_.Tensor", Some("addcmul"), None);
    check("_foreach_zero_", Some("zero"), None);
    check("_foreach_copy_", Some("copy"), None);
    check("_foreach_maximum_.Scalar", Some("clamp_min"), None);
    check("_fused_adamw_", Some("_fused_adamw_"), Some(Form::Mutating(vec![0, 1, 2, 3, 4])));
    check("native_batch_norm.out", Some("native_batch_norm"), Some(Form::Out(vec![8, 9, 10])));
    check("view", None, None);
}

#[test]
fn generators_are_taken() {
    for (name, known) in schemas() {
        let Some(binding) = bind(&known.schema) else { continue };
        let has = known.schema.args.iter().any(|a| a.ty == "Generator?");
        let takes = oxitorch_aten::row(binding.op).params().iter().any(|p| p.kind == ParamKind::Rng);
        assert!(!has || takes, "{name} has a generator and its row ignores it");
    }
}
