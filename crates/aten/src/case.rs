//! One call of a row, written as a line of text: `add.Tensor f32[2,3] f32[3]@pos none`.
//!
//! Golden files, tests and tools share this notation. Tokens are separated by blanks and contain none:
//!
//! | token | argument |
//! |---|---|
//! | `f32[2,3]`, `i64[]` | a tensor; dtypes `bool i8 i16 i32 i64 u8 u16 u32 u64 f16 bf16 f32 f64 c64 c128 f8e4m3fn f8e5m2` |
//! | `f32[4]@pos` | the same with values for whoever runs it: `pos` (0.1 to 2), `unit` (0 to 1), `<5` (integers 0 to 4), `-1..1`, `!0` (not zero), `edge` (infinities, NaN, zeros among others), `perm` (a permutation in the last dimension) |
//! | `~1.5` | a Python number that PyTorch wrapped into a tensor |
//! | `{f32[2],none}` | a list of tensors |
//! | `1`, `1.5`, `true`, `1+2j`, `inf`, `nan` | a number: an operand or an attribute, as the parameter wants it |
//! | `[1,2]`, `[0.5]`, `[true]` | a list |
//! | `"floor"` | a string |
//! | `float32` | a dtype |
//! | `rng` | a generator |
//! | `none` | `None` |

use crate::args::{Arg, NumKind, Number, Offset, ParamKind, ScalarArg, TensorArg, number_arg};
use crate::context::Config;
use crate::dtype;
use crate::error::Error;
use crate::lower::lower;
use crate::numbers::Numbers;
use crate::table::{OpId, find, row};
use oxitorch_hlo::{Builder, DType, Dims, TensorType, Value};

/// A parsed line.
#[derive(Clone, Debug)]
pub struct Case {
    /// The row.
    pub op: OpId,
    /// Its arguments.
    pub args: Vec<Arg>,
    /// The types of the operands that the arguments refer to.
    pub operands: Vec<TensorType>,
    /// The offsets that the arguments refer to.
    pub offsets: Vec<i64>,
    /// The numbers among the arguments.
    pub numbers: Vec<Option<Number>>,
}

impl Case {
    /// Reads a line.
    pub fn parse(line: &str) -> Result<Case, String> {
        let mut tokens = line.split_whitespace();
        let name = tokens.next().ok_or("an empty case")?;
        let op = find(name).ok_or_else(|| format!("no row `{name}`"))?;
        let tokens: Vec<&str> = tokens.collect();
        let params = row(op).params();
        if tokens.len() != params.len() {
            let rust: Vec<_> = params.iter().map(|p| format!("{p:?}")).collect();
            return Err(format!("`{name}` takes {} arguments: {}", params.len(), rust.join(", ")));
        }
        let mut case = Case {
            op,
            args: Vec::new(),
            operands: Vec::new(),
            offsets: Vec::new(),
            numbers: vec![None; tokens.len()],
        };
        for (i, (token, param)) in tokens.iter().zip(params).enumerate() {
            case.numbers[i] =
                number(token).ok().or_else(|| dtype_of(token).map(|d| Number::Int(dtype::code(d))));
            let arg = case.argument(token, param.kind).map_err(|e| format!("`{token}` in `{line}`: {e}"))?;
            case.args.push(arg);
        }
        Ok(case)
    }

    /// Lowers the call into a module of its own and prints that.
    pub fn text(&self, config: &Config) -> Result<String, Error> {
        self.text_of(config, |b| self.operands.iter().map(|ty| b.param(ty.clone())).collect())
    }

    /// The same with operands that something else has made.
    pub fn text_of(
        &self,
        config: &Config,
        operands: impl FnOnce(&Builder) -> Vec<Value>,
    ) -> Result<String, Error> {
        self.check_numbers()?;
        let b = Builder::new();
        let operands = operands(&b);
        let mut offsets = self.offsets.clone();
        if let Some(place) = row(self.op).place_offsets {
            place(&self.args, &mut offsets)?;
        }
        let offsets: Vec<Offset> = offsets.into_iter().map(Offset::Known).collect();
        let lowered = lower(self.op, &b, config, &self.args, &operands, &offsets)?;
        let outputs: Vec<_> = lowered.outputs.into_iter().flatten().collect();
        let module = b.finish(&outputs).map_err(|e| crate::error::runtime(e.to_string()))?;
        Ok(module.to_text())
    }

    /// What the caller of a row does before the numbers become operands.
    fn check_numbers(&self) -> Result<(), Error> {
        let row = row(self.op);
        let dtype =
            self.args.iter().find_map(|a| if let Arg::Tensor(t) = a { Some(t.ty.dtype) } else { None });
        let text = self.args.iter().find_map(|a| if let Arg::Str(s) = a { Some(s.as_str()) } else { None });
        let numbers = Numbers { by_param: &self.numbers, text, dtype };
        if let Some(check) = row.check_numbers {
            check(&numbers)?;
        }
        if let (Some(count), Some(Arg::Int(given))) = (row.counted_by, self.args.last()) {
            let n = count(&numbers)?;
            if n != *given {
                return Err(crate::error::value(format!("the size is {n}, the case says {given}")));
            }
        }
        Ok(())
    }

    fn operand(&mut self, ty: TensorType) -> u32 {
        self.operands.push(ty);
        self.operands.len() as u32 - 1
    }

    fn argument(&mut self, token: &str, kind: ParamKind) -> Result<Arg, String> {
        if token == "none" {
            return Ok(Arg::None);
        }
        if token == "rng" {
            return Ok(Arg::Rng(self.operand(TensorType::new(DType::U64, [2].as_slice()))));
        }
        if let Some(text) = token.strip_prefix('"') {
            return Ok(Arg::Str(text.strip_suffix('"').ok_or("the string does not end")?.to_string()));
        }
        match kind {
            ParamKind::Tensor | ParamKind::OptTensor => self.tensor(token).map(Arg::Tensor),
            ParamKind::Tensors | ParamKind::OptTensors => self.tensors(token),
            ParamKind::Numbers => self.numbers(token),
            ParamKind::Offset | ParamKind::Offsets => self.offset(token),
            _ => self.attribute(token, kind),
        }
    }

    fn tensor(&mut self, token: &str) -> Result<TensorArg, String> {
        if let Some(text) = token.strip_prefix('~') {
            let ty = TensorType::scalar(num_kind(number(text)?).dtype());
            let operand = self.operand(ty.clone());
            return Ok(TensorArg { operand, ty, wrapped: true, strides: Dims::new() });
        }
        let ty = tensor_type(token)?;
        let strides = contiguous(&ty.shape);
        Ok(TensorArg { operand: self.operand(ty.clone()), ty, wrapped: false, strides })
    }

    fn tensors(&mut self, token: &str) -> Result<Arg, String> {
        let inner =
            token.strip_prefix('{').and_then(|t| t.strip_suffix('}')).ok_or("a list of tensors is {..}")?;
        let mut list = Vec::new();
        for part in split(inner) {
            list.push(if part == "none" { None } else { Some(self.tensor(part)?) });
        }
        Ok(Arg::Tensors(list))
    }

    /// `[1,2]` or `[0.5,2.0]` as an operand.
    fn numbers(&mut self, token: &str) -> Result<Arg, String> {
        let ty = match self.attribute(token, ParamKind::Attr)? {
            Arg::Ints(list) => format!("i64[{}]", list.len()),
            Arg::Floats(list) => format!("f64[{}]", list.len()),
            _ => return Err("no numbers".into()),
        };
        self.tensor(&ty).map(Arg::Tensor)
    }

    /// `1` or `[1,2]` as offsets.
    fn offset(&mut self, token: &str) -> Result<Arg, String> {
        let first = self.offsets.len() as u32;
        match self.attribute(token, ParamKind::Attr)? {
            Arg::Int(n) => {
                self.offsets.push(n);
                Ok(Arg::Offset(first))
            }
            Arg::Ints(list) => {
                self.offsets.extend(&list);
                Ok(Arg::Offsets(first, list.len() as u32))
            }
            _ => Err("no integers".into()),
        }
    }

    fn attribute(&mut self, token: &str, kind: ParamKind) -> Result<Arg, String> {
        if let Some(inner) = token.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            return list(&split(inner));
        }
        if let Some(dtype) = dtype_of(token) {
            return Ok(Arg::Int(dtype::code(dtype)));
        }
        let n = number(token)?;
        Ok(match number_arg(kind, n) {
            Some(arg) => arg,
            None => {
                let kind = num_kind(n);
                Arg::Scalar(ScalarArg { operand: self.operand(TensorType::scalar(kind.dtype())), kind })
            }
        })
    }
}

/// Parts between commas outside brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.retain(|p| !p.is_empty());
    parts
}

fn list(parts: &[&str]) -> Result<Arg, String> {
    let numbers = parts.iter().map(|p| number(p)).collect::<Result<Vec<_>, _>>()?;
    if numbers.iter().any(|n| matches!(n, Number::Bool(_))) {
        return Ok(Arg::Bools(numbers.iter().map(|n| *n == Number::Bool(true)).collect()));
    }
    if numbers.iter().any(|n| matches!(n, Number::Float(_))) {
        return Ok(Arg::Floats(numbers.iter().map(|n| f64_of(*n).into()).collect()));
    }
    Ok(Arg::Ints(numbers.iter().map(|n| f64_of(*n) as i64).collect()))
}

fn f64_of(n: Number) -> f64 {
    crate::args::Const(n).f64()
}

fn num_kind(n: Number) -> NumKind {
    match n {
        Number::Bool(_) => NumKind::Bool,
        Number::Int(_) => NumKind::Int,
        Number::Float(_) => NumKind::Float,
        Number::Complex(..) => NumKind::Complex,
    }
}

/// A number as calls spell it.
pub fn number(text: &str) -> Result<Number, String> {
    match text {
        "true" => return Ok(Number::Bool(true)),
        "false" => return Ok(Number::Bool(false)),
        _ => {}
    }
    if let Ok(i) = text.parse() {
        return Ok(Number::Int(i));
    }
    if let Some(complex) = text.strip_suffix('j') {
        let at = complex.rfind(['+', '-']).filter(|&i| i > 0).unwrap_or(0);
        let part = |t: &str| if t.is_empty() { Ok(0.0) } else { t.parse::<f64>().map_err(|e| e.to_string()) };
        return Ok(Number::Complex(part(&complex[..at])?, part(&complex[at..])?));
    }
    text.parse().map(Number::Float).map_err(|_| "not an argument".to_string())
}

/// Short names of dtypes, as cases write them.
const SHORT: &[(&str, DType)] = &[
    ("bool", DType::Pred),
    ("i8", DType::S8),
    ("i16", DType::S16),
    ("i32", DType::S32),
    ("i64", DType::S64),
    ("u8", DType::U8),
    ("u16", DType::U16),
    ("u32", DType::U32),
    ("u64", DType::U64),
    ("f16", DType::F16),
    ("bf16", DType::BF16),
    ("f32", DType::F32),
    ("f64", DType::F64),
    ("c64", DType::C64),
    ("c128", DType::C128),
    ("f8e4m3fn", DType::F8E4M3FN),
    ("f8e5m2", DType::F8E5M2),
];

fn dtype_of(token: &str) -> Option<DType> {
    DType::from_torch_name(token)
}

fn tensor_type(token: &str) -> Result<TensorType, String> {
    let token = token.split('@').next().unwrap_or(token);
    let (name, rest) = token.split_once('[').ok_or("a tensor is f32[2,3]")?;
    let dtype = SHORT.iter().find(|(n, _)| *n == name).ok_or_else(|| format!("no dtype `{name}`"))?.1;
    let inner = rest.strip_suffix(']').ok_or("the shape does not end")?;
    let shape: Result<Dims, _> = split(inner).iter().map(|d| d.parse::<i64>()).collect();
    Ok(TensorType::new(dtype, shape.map_err(|e| e.to_string())?))
}

fn contiguous(shape: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1].max(1);
    }
    strides
}
