//! A recorded program: its operations, what goes in and comes out, where it comes from.

use crate::tensor::{Beside, Label, TensorType, dtype};
use oxitorch_hlo::{DType, Precision};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// Why a sequence of operations ended, and became a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// The mode runs one op at a time.
    Mode,
    /// A value is read.
    Read,
    /// Somebody waits for the device, or asks whether it is done.
    Wait,
    /// An optimizer has made its step.
    Step,
    /// A loop came round.
    Loop,
    /// So many ops were recorded.
    Ops,
    /// The recorded ops make so many bytes.
    Bytes,
    /// Other compiler options are in force.
    Options,
    /// The user asked for a barrier.
    Barrier,
    /// A backward computes a part of the forward again.
    Recompute,
    /// A part of a window that has no program as a whole.
    Part,
    /// A collective comes, or has come: it is a program of its own, since each member of its group has to have it.
    Collective,
    /// A call that is one program (`torch.tpu.jit`, a compiled graph whose sizes vary) comes, or has come.
    Jit,
}

impl Reason {
    /// In the order of declaration.
    pub const ALL: [Reason; 13] = [
        Reason::Mode,
        Reason::Read,
        Reason::Wait,
        Reason::Step,
        Reason::Loop,
        Reason::Ops,
        Reason::Bytes,
        Reason::Options,
        Reason::Barrier,
        Reason::Recompute,
        Reason::Part,
        Reason::Collective,
        Reason::Jit,
    ];

    /// In a word, as it is written and metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Mode => "mode",
            Reason::Read => "read",
            Reason::Wait => "wait",
            Reason::Step => "step",
            Reason::Loop => "loop",
            Reason::Ops => "ops",
            Reason::Bytes => "bytes",
            Reason::Options => "options",
            Reason::Barrier => "barrier",
            Reason::Recompute => "recompute",
            Reason::Part => "part",
            Reason::Collective => "collective",
            Reason::Jit => "jit",
        }
    }
}

/// A recorded operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// The overload of ATen: `add.Tensor`.
    pub op: String,
    /// The types of its results; none for a result that nobody asked for.
    #[serde(default)]
    pub results: Vec<Option<TensorType>>,
    /// The Python line that called it, of the backward pass that of the forward operation: `train.py:8 in step`.
    pub line: Option<String>,
    /// Whether it is of the backward pass of that line.
    #[serde(default)]
    pub backward: bool,
}

/// A tensor or number that goes into a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// Dtype and shape.
    pub r#type: TensorType,
    /// What it takes on the device.
    pub bytes: u64,
    /// What it is for.
    #[serde(flatten)]
    pub label: Label,
    /// The Python line that made it; for parameters that of the optimizer's step.
    pub line: Option<String>,
    /// Whether a result takes its memory.
    pub donated: bool,
    /// Along which axes of a mesh each dimension is split, `-` for none: `data, -`. None: each device has the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
}

/// A tensor that comes out of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Dtype and shape; none for a number that checks others.
    pub r#type: Option<TensorType>,
    /// What it takes on the device.
    pub bytes: u64,
    /// What it is for.
    #[serde(flatten)]
    pub label: Label,
    /// The operation that makes it, by its place in [`Program::ops`].
    pub op: usize,
    /// As in [`Input`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
}

impl Input {
    /// An input of which only type and bytes are known.
    pub fn new(r#type: TensorType, bytes: u64) -> Input {
        Input { r#type, bytes, label: Label::default(), line: None, donated: false, split: None }
    }
}

impl Output {
    /// An output of the operation at this place, of which only type and bytes are known.
    pub fn new(r#type: Option<TensorType>, bytes: u64, op: usize) -> Output {
        Output { r#type, bytes, label: Label::default(), op, split: None }
    }
}

/// Matrix products and convolutions of a line that are alike: `batch` products of an m x k by a k x n matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Products {
    /// The type of the operands' elements.
    #[serde(with = "dtype")]
    pub dtype: DType,
    /// How exact the product is.
    #[serde(with = "precision")]
    pub precision: Precision,
    /// Independent products in one.
    pub batch: f64,
    /// Rows of the left operand.
    pub m: f64,
    /// Columns of the right operand.
    pub n: f64,
    /// What is summed over.
    pub k: f64,
    /// The overload of ATen that asked for it.
    pub op: Option<String>,
    /// The Python line that did.
    pub line: Option<String>,
    /// How many there are.
    pub count: u64,
    /// Floating point operations of all of them.
    pub flops: f64,
}

/// The precision of products by StableHLO's name.
mod precision {
    use super::*;

    const ALL: [Precision; 3] = [Precision::Default, Precision::High, Precision::Highest];

    pub(super) fn serialize<S: Serializer>(precision: &Precision, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(precision.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Precision, D::Error> {
        let name = String::deserialize(from)?;
        let known = ALL.into_iter().find(|p| p.name() == name);
        known.ok_or_else(|| serde::de::Error::custom(format!("no precision `{name}`")))
    }
}

/// What made a program a new one, in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// It is the first program of the process.
    First,
    /// These lines run for the first time.
    NewLines,
    /// A size changed.
    Size,
    /// A dtype changed.
    Dtype,
    /// An argument that shapes the program changed.
    Attribute,
    /// Other operations came.
    Ops,
    /// The same lines run more often, or less: a loop or a recursion.
    Rounds,
    /// It ends elsewhere.
    Cut,
    /// Other results can be seen.
    Visible,
    /// Offsets differ, and are operands from now on.
    Offsets,
    /// The compiler's options changed.
    Options,
    /// Anything else.
    Other,
}

/// Why a program is a new one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Why {
    /// Programs are counted from 1.
    pub number: u64,
    /// Why and where it was launched.
    pub launched: String,
    /// The number of the program before that is most like it.
    pub nearest: Option<u64>,
    /// In a word.
    pub cause: Cause,
    /// What differs from that, a line each.
    pub differences: Vec<String>,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Why no result takes the memory of an input that nobody uses any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UndonatedReason {
    /// No result without a place has its size.
    Size,
    /// A variable or autograd still held it.
    Held,
}

impl UndonatedReason {
    /// In a word, as it is written.
    pub fn name(self) -> &'static str {
        match self {
            UndonatedReason::Size => "size",
            UndonatedReason::Held => "held",
        }
    }
}

/// An input that no result overwrites, though nobody uses it after the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Undonated {
    /// Its place in [`Program::inputs`].
    pub input: usize,
    /// Dtype and shape.
    pub r#type: TensorType,
    /// What it takes on the device.
    pub bytes: u64,
    /// The Python line that made it.
    pub line: Option<String>,
    /// Why it is not overwritten.
    pub reason: UndonatedReason,
}

/// The value of a compiler's option.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CompilerOption {
    /// On or off.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Anything else.
    Text(String),
}

impl fmt::Display for CompilerOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompilerOption::Bool(v) => v.fmt(f),
            CompilerOption::Int(v) => v.fmt(f),
            CompilerOption::Float(v) => v.fmt(f),
            CompilerOption::Text(v) => v.fmt(f),
        }
    }
}

/// A program that was recorded and not compiled. Its text is in a file of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The beginning of its key in the cache, hexadecimal; the name of its file.
    pub id: String,
    /// For people: its first and last operations.
    pub name: String,
    /// The first Python line in it that is known.
    pub first_line: Option<String>,
    /// Why it ended.
    pub ended_by: Option<Reason>,
    /// Which collective that is, if one is the reason: `all_reduce(float32[1000]), number 3 of group 0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by_collective: Option<String>,
    /// The Python line at which it ended.
    pub ended_at: Option<String>,
    /// Its operations in order.
    pub ops: Vec<Op>,
    /// What goes in.
    pub inputs: Vec<Input>,
    /// What comes out.
    pub outputs: Vec<Output>,
    /// Training step and launches in it, in order.
    pub launches: Vec<(u64, u64)>,
    /// The most bytes that are in use besides its inputs when it is launched.
    pub beside_bytes: u64,
    /// The tensors that `beside_bytes` is of, as far as they are known.
    #[serde(default)]
    pub tensors_beside: Vec<Beside>,
    /// Its matrix products and convolutions.
    #[serde(default)]
    pub products: Vec<Products>,
    /// The compiler's options, by name.
    #[serde(default)]
    pub options: BTreeMap<String, CompilerOption>,
    /// Why it is a new one.
    #[serde(default)]
    pub why: Option<Why>,
    /// Inputs whose memory it could have had.
    #[serde(default)]
    pub undonated: Vec<Undonated>,
}

impl Program {
    /// Launches in a training step.
    pub fn launches_in(&self, step: u64) -> u64 {
        self.launches.iter().filter(|(s, _)| *s == step).map(|(_, n)| n).sum()
    }

    /// Bytes of all inputs.
    pub fn input_bytes(&self) -> u64 {
        self.inputs.iter().map(|i| i.bytes).sum()
    }

    /// Bytes of all outputs.
    pub fn output_bytes(&self) -> u64 {
        self.outputs.iter().map(|o| o.bytes).sum()
    }

    /// Bytes of the inputs whose memory outputs take.
    pub fn donated_bytes(&self) -> u64 {
        self.inputs.iter().filter(|i| i.donated).map(|i| i.bytes).sum()
    }

    /// Floating point operations of its products.
    pub fn product_flops(&self) -> f64 {
        self.products.iter().map(|p| p.flops).sum()
    }

    /// The operation that makes an output.
    pub fn made(&self, output: &Output) -> Option<&Op> {
        self.ops.get(output.op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_written_as_they_are_named() {
        for reason in Reason::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
        }
    }

    #[test]
    fn options_keep_their_kinds() {
        let options = [
            CompilerOption::Bool(true),
            CompilerOption::Int(-3),
            CompilerOption::Float(0.5),
            CompilerOption::Text("a".into()),
        ];
        for option in options {
            let text = serde_json::to_string(&option).unwrap();
            assert_eq!(serde_json::from_str::<CompilerOption>(&text).unwrap(), option, "{text}");
        }
    }
}
