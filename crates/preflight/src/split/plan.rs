//! How a program that was recorded for one device is split over the chips of a slice.
//!
//! A [`Plan`] says for each argument and result which of its dimensions are cut along which axes of a mesh of devices. It
//! follows from what the tensors are for; the compiler finds the rest of the program's shardings and puts in the
//! collectives.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

use oxitorch_capture::{Beside, Capture, Label, Program, Role, TensorType};
use serde::{Deserialize, Serialize};

use super::mesh::{Mesh, Split, Splits, whole};
use super::rules::Rules;
use crate::verdict::Verdict;

/// What the user asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Parallel {
    /// Data parallel: each device has all parameters and a part of the batch.
    Dp,
    /// Data parallel, with parameters, gradients and the optimizer's state split as well.
    Fsdp,
    /// The better of both.
    Auto,
    /// A file of patterns.
    Rules(PathBuf),
}

impl FromStr for Parallel {
    type Err = String;

    fn from_str(text: &str) -> Result<Parallel, String> {
        match text {
            "dp" => Ok(Parallel::Dp),
            "fsdp" => Ok(Parallel::Fsdp),
            "auto" => Ok(Parallel::Auto),
            file if file.ends_with(".toml") => Ok(Parallel::Rules(file.into())),
            _ => Err("expected dp, fsdp, auto, or a file of patterns that ends in .toml".to_owned()),
        }
    }
}

impl Parallel {
    /// The ways to try on so many devices; none on one.
    pub(crate) fn strategies(parallel: Option<&Parallel>, devices: u64) -> anyhow::Result<Vec<Strategy>> {
        Ok(match parallel.filter(|_| devices > 1) {
            None => Vec::new(),
            Some(Parallel::Dp) => vec![Strategy::Dp],
            Some(Parallel::Fsdp) => vec![Strategy::Fsdp],
            Some(Parallel::Auto) => vec![Strategy::Dp, Strategy::Fsdp],
            Some(Parallel::Rules(file)) => vec![Strategy::Rules(Rules::read(file)?)],
        })
    }
}

/// One way to split.
#[derive(Clone, Debug)]
pub(crate) enum Strategy {
    Dp,
    Fsdp,
    Rules(Rules),
}

impl Strategy {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Strategy::Dp => "dp",
            Strategy::Fsdp => "fsdp",
            Strategy::Rules(_) => "rules",
        }
    }
}

/// How all programs are split, as the compiler's process reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) mesh: Mesh,
    pub(crate) programs: BTreeMap<String, Splits>,
    /// Splits of tensors that programs do not take, by role, name and shape.
    #[serde(skip)]
    beside: BTreeMap<(Label, Vec<u64>), Split>,
    #[serde(skip)]
    pub(crate) told: Told,
}

/// What is said of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Told {
    /// `dp`, `fsdp` or `rules`.
    pub(crate) strategy: &'static str,
    /// Axes of the mesh and their sizes.
    pub(crate) mesh: BTreeMap<String, u64>,
    /// The first dimension of the tensors that are split as the batch.
    pub(crate) batch: Option<u64>,
    /// What may not be as it was meant.
    pub(crate) notes: Vec<String>,
    /// What else was tried.
    pub(crate) tried: Vec<Tried>,
}

impl Told {
    /// In a few words.
    pub(crate) fn words(&self) -> String {
        let what = match self.strategy {
            "dp" => "data parallel",
            "fsdp" => "data parallel, parameters and state split",
            _ => "split as the patterns say",
        };
        let batch = self.batch.map_or(String::new(), |n| format!(", batch of {n}"));
        let tried = if self.tried.is_empty() { "" } else { " (the better of dp and fsdp)" };
        format!("{what}{tried}{batch}")
    }
}

/// A strategy that was not taken, or was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Tried {
    pub(crate) strategy: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) need_bytes: Option<u64>,
    pub(crate) roofline_s: Option<f64>,
}

/// Tensors of fewer elements are not worth a collective of their own.
const SMALL: u64 = 1024;

/// The axis of meshes that nobody has named.
const DATA: &str = "data";

impl Plan {
    /// The plan of a strategy for so many devices; an error says what is in the way. The batch is what the script marks
    /// where it cannot be found.
    pub(crate) fn new(
        capture: &Capture,
        marked_batch: Option<u64>,
        strategy: &Strategy,
        devices: u64,
    ) -> Result<Plan, String> {
        let mesh = match strategy {
            Strategy::Rules(rules) => rules.mesh.clone(),
            Strategy::Dp | Strategy::Fsdp => Mesh(vec![(DATA.to_owned(), devices)]),
        };
        if mesh.devices() != devices {
            let axes: Vec<String> = mesh.0.iter().map(|(name, n)| format!("{name}={n}")).collect();
            let (axes, all) = (axes.join(" x "), mesh.devices());
            return Err(format!("the mesh {axes} has {all} devices and the slice {devices}"));
        }
        let batch_axes = match strategy {
            Strategy::Rules(rules) => rules.batch.clone(),
            Strategy::Dp | Strategy::Fsdp => vec![DATA.to_owned()],
        };
        let told =
            Told { strategy: strategy.name(), mesh: mesh.0.iter().cloned().collect(), ..Told::default() };
        let mut planner = Planner { strategy, batch_axes, batch: None, mesh: &mesh };
        let parts = planner.batch_parts();
        let mut notes = Vec::new();
        match batch(capture, marked_batch).filter(|_| parts > 1) {
            Some(found) if found.size.is_multiple_of(parts) => planner.batch = Some(found.size),
            Some(found) => {
                let Batch { size, r#type, line } = found;
                let line = line.map_or(String::new(), |l| format!(" of {l}"));
                return Err(format!(
                    "the batch cannot be split: the first dimension of {type}{line} is {size}, which {parts} devices do not divide"
                ));
            }
            None if parts > 1 => notes.push(
                "no batch was found among what goes into the last step, so each device computes all of it"
                    .to_owned(),
            ),
            None => {}
        }
        if let Strategy::Rules(rules) = strategy {
            notes.extend(rules.unused(capture));
        }
        let programs: BTreeMap<String, Splits> =
            capture.programs.iter().map(|p| (p.id.clone(), planner.splits(p))).collect();
        let batch = planner.batch;
        let beside = capture.programs.iter().flat_map(|p| &p.tensors_beside);
        let beside = beside
            .filter_map(|b| Some(((b.label.clone(), b.shape.clone()), planner.split(&b.label, &b.shape)?)))
            .collect();
        Ok(Plan { beside, programs, told: Told { batch, notes, ..told }, mesh })
    }

    /// On how many devices different parts of it are.
    fn parts(&self, split: &Split) -> u64 {
        split.iter().flatten().map(|axis| self.mesh.size(axis)).product()
    }

    /// What of so many bytes is on one device.
    pub(crate) fn bytes(&self, whole: u64, split: Option<&Split>) -> u64 {
        whole.div_ceil(split.map_or(1, |s| self.parts(s)).max(1))
    }

    /// What of a tensor is on one device.
    fn local(&self, ty: &TensorType, split: Option<&Split>) -> TensorType {
        let part = |(n, axes): (&u64, &Vec<String>)| {
            n.div_ceil(axes.iter().map(|a| self.mesh.size(a)).product::<u64>().max(1))
        };
        let shape = split.map_or_else(|| ty.shape.clone(), |s| ty.shape.iter().zip(s).map(part).collect());
        TensorType { shape, ..ty.clone() }
    }

    /// What was captured, as it is for one of the devices.
    pub(crate) fn on_one_device(&self, capture: &Capture) -> Capture {
        let mut capture = capture.clone();
        let mut saved = 0;
        for p in &mut capture.programs {
            let none = Splits::default();
            let splits = self.programs.get(&p.id).unwrap_or(&none);
            let held = |p: &Program| p.input_bytes() + p.beside_bytes;
            let before = held(p);
            for (input, split) in p.inputs.iter_mut().zip(&splits.inputs) {
                input.bytes = self.bytes(input.bytes, split.as_ref());
                input.r#type = self.local(&input.r#type, split.as_ref());
                input.split = text(split.as_ref());
            }
            for (output, split) in p.outputs.iter_mut().zip(&splits.outputs) {
                output.bytes = self.bytes(output.bytes, split.as_ref());
                output.r#type = output.r#type.as_ref().map(|ty| self.local(ty, split.as_ref()));
                output.split = text(split.as_ref());
            }
            for u in &mut p.undonated {
                let split = splits.inputs.get(u.input).and_then(Option::as_ref);
                (u.bytes, u.r#type) = (self.bytes(u.bytes, split), self.local(&u.r#type, split));
            }
            let whole: u64 = p.tensors_beside.iter().map(|b| b.bytes).sum();
            let part = |b: &Beside| self.bytes(b.bytes, self.beside.get(&(b.label.clone(), b.shape.clone())));
            let part: u64 = p.tensors_beside.iter().map(part).sum();
            p.beside_bytes = p.beside_bytes.saturating_sub(whole.saturating_sub(part));
            p.products.iter_mut().for_each(|product| product.flops /= self.mesh.devices() as f64);
            saved = saved.max(before.saturating_sub(held(p)));
        }
        capture.resident_peak_bytes = capture.resident_peak_bytes.saturating_sub(saved);
        capture
    }

    /// The splits of a program.
    pub(crate) fn of(&self, id: &str) -> Option<&Splits> {
        self.programs.get(id)
    }
}

/// The batch: how many samples a step takes.
#[derive(Debug, PartialEq)]
struct Batch {
    size: u64,
    r#type: String,
    line: Option<String>,
}

/// Finds the batch of the last step: the first dimension of the largest tensor that the step copies from the host. If it
/// copies none that has dimensions, it is the first dimension that most tensors share that were on the device before the
/// step and that nobody has named; of several, that of the largest tensor. Where all of a step's data are made on the
/// device, it is what the script marks.
fn batch(capture: &Capture, marked: Option<u64>) -> Option<Batch> {
    let last = capture.steps.saturating_sub(1);
    let mut data: Vec<(u64, Batch)> = Vec::new();
    let mut resident: Vec<(u64, Batch)> = Vec::new();
    for p in capture.programs.iter().filter(|p| p.launches_in(last) > 0) {
        for input in &p.inputs {
            let place = match input.label.role {
                Role::Data => &mut data,
                Role::Other => &mut resident,
                _ => continue,
            };
            if let Some(&size) = input.r#type.shape.first() {
                let (r#type, line) = (input.r#type.to_string(), input.line.clone());
                place.push((input.bytes, Batch { size, r#type, line }));
            }
        }
    }
    if data.is_empty() {
        let count = |size: u64| resident.iter().filter(|(_, b)| b.size == size).count();
        let most = resident.iter().map(|(_, b)| count(b.size)).max().unwrap_or(0);
        data = resident.iter().filter(|(_, b)| count(b.size) == most).map(|(n, b)| (*n, b.again())).collect();
    }
    // The first of the largest.
    let largest = data.into_iter().rev().max_by_key(|(bytes, _)| *bytes).map(|(_, b)| b);
    let as_marked = |size| Batch { size, r#type: "the batch that the script marks".to_owned(), line: None };
    largest.or_else(|| marked.filter(|n| *n > 0).map(as_marked))
}

impl Batch {
    fn again(&self) -> Batch {
        Batch { size: self.size, r#type: self.r#type.clone(), line: self.line.clone() }
    }
}

struct Planner<'a> {
    strategy: &'a Strategy,
    mesh: &'a Mesh,
    batch_axes: Vec<String>,
    batch: Option<u64>,
}

impl Planner<'_> {
    fn batch_parts(&self) -> u64 {
        self.batch_axes.iter().map(|a| self.mesh.size(a)).product()
    }

    fn splits(&self, p: &Program) -> Splits {
        // A number that checks others is whole.
        let output = |o: &oxitorch_capture::Output| {
            self.split(&o.label, o.r#type.as_ref().map_or(&[], |ty| ty.shape.as_slice()))
        };
        Splits {
            inputs: p.inputs.iter().map(|i| self.split(&i.label, &i.r#type.shape)).collect(),
            outputs: p.outputs.iter().map(output).collect(),
        }
    }

    fn split(&self, label: &Label, shape: &[u64]) -> Option<Split> {
        if shape.is_empty() {
            return Some(Split::new());
        }
        match label.role {
            Role::Parameter | Role::Gradient | Role::State => {
                Some(self.of_parameter(label.name.as_deref().unwrap_or_default(), shape))
            }
            Role::Data | Role::Other => {
                Some(if self.is_batch(shape) { self.along_batch(shape) } else { whole(shape) })
            }
            // What the programs of a step hand on may have samples and positions in one dimension.
            Role::Intermediate => self.is_batch(shape).then(|| self.along_batch(shape)),
            Role::Buffer | Role::Number => Some(whole(shape)),
        }
    }

    /// Whether the first dimension is that of the batch, alone or with others in it.
    fn is_batch(&self, shape: &[u64]) -> bool {
        self.batch.is_some_and(|batch| shape[0] > 0 && shape[0].is_multiple_of(batch))
    }

    fn along_batch(&self, shape: &[u64]) -> Split {
        let mut split = whole(shape);
        split[0] = self.batch_axes.clone();
        split
    }

    /// Of a parameter and what belongs to it.
    fn of_parameter(&self, name: &str, shape: &[u64]) -> Split {
        match self.strategy {
            Strategy::Dp => whole(shape),
            Strategy::Fsdp => largest(shape, DATA, self.mesh.size(DATA)),
            Strategy::Rules(rules) => {
                // What belongs to a parameter is named after it.
                let owner = name.split('/').next().unwrap_or(name);
                match rules.of(owner, shape) {
                    Some(split) => split,
                    None => rules
                        .rest
                        .as_ref()
                        .map_or_else(|| whole(shape), |axis| largest(shape, axis, self.mesh.size(axis))),
                }
            }
        }
    }
}

/// For people: the axes of each dimension; none if each device has the whole.
fn text(split: Option<&Split>) -> Option<String> {
    let dim = |axes: &Vec<String>| if axes.is_empty() { "-".to_owned() } else { axes.join("+") };
    let split = split.filter(|s| s.iter().any(|d| !d.is_empty()))?;
    Some(split.iter().map(dim).collect::<Vec<_>>().join(", "))
}

/// Along the largest dimension that divides; small ones are whole.
fn largest(shape: &[u64], axis: &str, parts: u64) -> Split {
    let mut split = whole(shape);
    let dims = shape.iter().enumerate().rev().filter(|(_, n)| **n > 0 && n.is_multiple_of(parts));
    if let Some((dim, _)) = dims.max_by_key(|(_, n)| **n).filter(|_| shape.iter().product::<u64>() >= SMALL) {
        split[dim].push(axis.to_owned());
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxitorch_capture::Input;

    /// A program with inputs of these types and roles.
    fn capture(inputs: &[(&str, Label)]) -> Capture {
        let input = |(ty, label): &(&str, Label)| Input {
            label: label.clone(),
            line: Some("a.py:3".into()),
            ..Input::new(ty.parse().unwrap(), 8)
        };
        let program = Program {
            id: "a".into(),
            inputs: inputs.iter().map(input).collect(),
            launches: vec![(0, 1)],
            ..Program::default()
        };
        Capture { steps: 1, programs: vec![program], ..Capture::default() }
    }

    fn named(role: Role, name: &str) -> Label {
        Label { role, name: Some(name.into()) }
    }

    /// Dimensions as their axes, `.` for none.
    fn shown(splits: &[Option<Split>]) -> Vec<String> {
        let dim = |axes: &Vec<String>| if axes.is_empty() { ".".to_owned() } else { axes.join("+") };
        let one = |s: &Option<Split>| {
            s.as_ref().map_or("?".to_owned(), |s| s.iter().map(dim).collect::<Vec<_>>().join(" "))
        };
        splits.iter().map(one).collect()
    }

    fn inputs() -> [(&'static str, Label); 9] {
        [
            ("float32[16, 32]", Role::Data.into()),
            ("float32[64, 32]", named(Role::Parameter, "0.weight")),
            ("float32[64]", named(Role::Parameter, "0.bias")),
            ("float32[30, 512]", named(Role::State, "1.weight/exp_avg")),
            ("float32[]", Role::Number.into()),
            ("float32[7, 7]", Role::Other.into()),
            ("float32[128, 5]", Role::Intermediate.into()),
            ("float32[100, 5]", Role::Intermediate.into()),
            ("bool[16, 16]", named(Role::Buffer, "mask")),
        ]
    }

    #[test]
    fn a_batch_is_split_and_parameters_are_whole_or_split() {
        let capture = capture(&inputs());
        let dp = Plan::new(&capture, None, &Strategy::Dp, 4).unwrap();
        let expected = ["data .", ". .", ".", ". .", "", ". .", "data .", "?", ". ."];
        assert_eq!(shown(&dp.of("a").unwrap().inputs), expected);
        assert_eq!((dp.told.batch, dp.mesh.devices()), (Some(16), 4));
        let fsdp = Plan::new(&capture, None, &Strategy::Fsdp, 4).unwrap();
        let expected = ["data .", "data .", ".", ". data", "", ". .", "data .", "?", ". ."];
        assert_eq!(shown(&fsdp.of("a").unwrap().inputs), expected);
        let split = fsdp.of("a").unwrap().inputs[1].as_ref();
        assert_eq!((fsdp.bytes(8192, split), fsdp.bytes(8192, None)), (2048, 8192));
        let one = &fsdp.on_one_device(&capture).programs[0];
        let types = [1, 4].map(|i: usize| one.inputs[i].r#type.to_string());
        assert_eq!((types, one.inputs[1].bytes), (["float32[16, 32]", "float32[]"].map(String::from), 2));
        assert_eq!((one.inputs[1].split.as_deref(), &one.inputs[4].split), (Some("data, -"), &None));
    }

    #[test]
    fn a_batch_that_does_not_divide_is_named() {
        let capture = capture(&[("float32[6, 8]", Role::Data.into())]);
        let error = Plan::new(&capture, None, &Strategy::Dp, 4);
        let error = error.unwrap_err();
        assert!(error.contains("float32[6, 8] of a.py:3 is 6, which 4 devices do not divide"), "{error}");
    }

    #[test]
    fn a_batch_on_the_device_is_what_most_share() {
        let other = || Role::Other.into();
        let weight = || ("float32[64, 16]", named(Role::Parameter, "w"));
        let resident =
            [("bool[128, 128]", other()), ("float32[16, 32]", other()), ("int64[16]", other()), weight()];
        let found = batch(&capture(&resident), None);
        assert_eq!(found.map(|b| (b.size, b.r#type)), Some((16, "float32[16, 32]".to_owned())));
        let capture = capture(&[weight()]);
        let none = Plan::new(&capture, None, &Strategy::Dp, 4).unwrap();
        assert_eq!((none.told.batch, none.told.notes.len()), (None, 1));
        let marked = Plan::new(&capture, Some(8), &Strategy::Dp, 4).unwrap();
        assert_eq!((marked.told.batch, marked.told.notes.len()), (Some(8), 0));
    }
}
