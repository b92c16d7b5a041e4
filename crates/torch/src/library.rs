//! The host function through which programs call torch's own CPU kernels: from the words of a custom call to the flat C
//! structs of the shim, which calls the op.

use crate::abi::{self, Arg, Payload, Shim, Tensor, tag};
use crate::sums::{self, Sums};
use oxitorch_aten::library::{CALL, FUNCTION, OP, word};
use oxitorch_aten::{DType, dtype};
use oxitorch_pjrt::{self as pjrt, ElementType, HostArg, HostCall, HostError, NamedValue};
use parking_lot::Mutex;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

/// Whether torch's products of float32 matrices are slower than the compiler's on this processor: on x86-64 they are
/// MKL's, which uses AVX-512 on Intel's processors alone, while XLA's (Eigen's) look at what the processor can.
pub(crate) fn multiplies_slowly() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        let maker = [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat();
        std::is_x86_feature_detected!("avx512f") && maker != b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Makes the function known to a plugin whose programs run in host memory; `counted` is called with each call.
pub(crate) fn register(plugin: &pjrt::Plugin, shim: &'static Shim, counted: fn()) -> pjrt::Result<()> {
    plugin.register_host_fn(FUNCTION, move |call| run(shim, counted, call))
}

fn run(shim: &Shim, counted: fn(), call: &mut HostCall<'_>) -> Result<(), HostError> {
    let op = call.attributes.get(OP).and_then(NamedValue::as_str).ok_or("a call without a name")?;
    let Some(NamedValue::Ints(words)) = call.attributes.get(CALL) else {
        return Err(format!("aten::{op}: a call without arguments").into());
    };
    let memory = |at: *const u8, bytes: usize, dtype| Memory { at: at.cast(), bytes, dtype };
    let results = call.results.iter_mut().map(|r| memory(r.bytes.as_mut_ptr(), r.bytes.len(), r.dtype));
    let results: Vec<Memory> = results.collect();
    let operands: Vec<Memory> =
        call.args.iter().map(|a| memory(a.bytes.as_ptr(), a.bytes.len(), a.dtype)).collect();
    let mut reader = Reader { words };
    let cut = reader.cut();
    let parsed = reader.args(&operands, &call.args).zip(reader.results(&results));
    let (args, results) =
        parsed.ok_or_else(|| format!("aten::{op}: arguments that this version does not understand"))?;
    counted();
    let op = CString::new(op).map_err(|e| e.to_string())?;
    let whole = Call { shim, op: &op, args: &args, results: &results };
    let Some(cut) = cut else { return whole.run(false) };
    let size =
        whole.size(&cut).ok_or_else(|| format!("aten::{}: parts that do not fit", op.to_string_lossy()))?;
    let threads = call.threads.count();
    let part = size.div_ceil(threads).next_multiple_of(cut.step.max(1));
    if part >= size {
        return whole.run(false);
    }
    let parts = size.div_ceil(part);
    let Some(sums) = whole.sums(&cut, parts) else { return whole.run(false) };
    let failed = Mutex::new(None);
    call.threads.share(parts, &|i| {
        let start = i * part;
        if let Err(error) = whole.part(&cut, start, part.min(size - start), sums.of(i)) {
            failed.lock().get_or_insert(error);
        }
    });
    failed.into_inner().map_or(Ok(()), Err)?;
    sums.add();
    Ok(())
}

/// A call of an ATen overload.
struct Call<'a> {
    shim: &'a Shim,
    op: &'a CStr,
    args: &'a [Item<'a>],
    results: &'a [Tensor],
}

// SAFETY: the tensors lie within the buffers of the program, and each part writes what is its own.
unsafe impl Sync for Call<'_> {}

/// How a call is made in parts: see [`word::PARTS`].
struct Cut<'a> {
    step: usize,
    /// Of each argument and result.
    dims: &'a [i64],
}

impl Call<'_> {
    /// How many elements there are to cut: the same number in each tensor that is.
    fn size(&self, cut: &Cut<'_>) -> Option<usize> {
        let args = self.args.iter().map(|arg| match arg {
            Item::Tensor(t) => Some(t),
            _ => None,
        });
        let tensors = args.chain(self.results.iter().map(Some));
        let mut found = None;
        for (tensor, &dim) in tensors.zip(cut.dims).filter(|(_, dim)| **dim >= 0) {
            let size = *tensor?.sizes().get(dim as usize)?;
            if *found.get_or_insert(size) != size {
                return None;
            }
        }
        let size = found.and_then(|n| usize::try_from(n).ok());
        size.filter(|_| cut.dims.len() == self.args.len() + self.results.len())
    }

    /// Room for the sums of so many parts, if that takes no more memory than what is cut.
    fn sums(&self, cut: &Cut<'_>, parts: usize) -> Option<Sums> {
        let (of_args, of_results) = cut.dims.split_at(self.args.len());
        let summed = self.results.iter().zip(of_results).filter(|(_, how)| **how == word::SUMMED);
        let sums = Sums::new(summed.map(|(result, _)| *result), parts)?;
        let bytes = |(arg, _): (&Item<'_>, &i64)| match arg {
            Item::Tensor(tensor) => sums::bytes(tensor).unwrap_or(0),
            _ => 0,
        };
        let images: usize = self.args.iter().zip(of_args).filter(|(_, dim)| **dim >= 0).map(bytes).sum();
        (sums.bytes() <= images).then_some(sums)
    }

    /// Runs it for these elements; `sums` is where it writes results that are summed.
    fn part(
        &self,
        cut: &Cut<'_>,
        start: usize,
        len: usize,
        mut sums: impl Iterator<Item = Tensor>,
    ) -> Result<(), HostError> {
        let mut own: Vec<Vec<i64>> = Vec::new();
        let mut narrow = |tensor: &Tensor, dim: i64| {
            let mut tensor = *tensor;
            if let Ok(dim) = usize::try_from(dim) {
                tensor.offset += start as i64 * tensor.strides()[dim];
                let mut sizes = tensor.sizes().to_vec();
                sizes[dim] = len as i64;
                tensor.sizes = sizes.as_ptr(); // on the heap, where it stays
                own.push(sizes);
            }
            tensor
        };
        let (dims, of_results) = cut.dims.split_at(self.args.len());
        let args = self.args.iter().zip(dims).map(|(arg, &dim)| match arg {
            Item::Tensor(tensor) => Item::Tensor(narrow(tensor, dim)),
            other => other.clone(),
        });
        let args: Vec<Item<'_>> = args.collect();
        let results: Option<Vec<Tensor>> = self
            .results
            .iter()
            .zip(of_results)
            .map(|(result, &dim)| match dim {
                word::SUMMED => sums.next(),
                _ => Some(narrow(result, dim)),
            })
            .collect();
        let results = results.ok_or("a sum without room")?;
        Call { args: &args, results: &results, ..*self }.run(true)
    }

    /// Runs it; `alone`, in no other thread.
    fn run(&self, alone: bool) -> Result<(), HostError> {
        let flat: Vec<Arg> = self.args.iter().map(Item::flat).collect();
        let mut error = abi::Error { kind: 0, message: null() };
        // SAFETY: the structs live through the call. The tensors lie within the buffers of the program, as the reader
        // has checked; those of results are written by nobody else, and of operands by nobody.
        let rc = unsafe {
            let (flat_count, count) = (flat.len() as u32, self.results.len() as u32);
            let (flat, results, alone) = (flat.as_ptr(), self.results.as_ptr(), alone.into());
            (self.shim.call)(self.op.as_ptr(), flat, flat_count, results, count, alone, &mut error)
        };
        if rc == abi::OK {
            return Ok(());
        }
        // SAFETY: set with an error, and valid until this thread's next call.
        let message = unsafe { CStr::from_ptr(error.message) }.to_string_lossy();
        let message = format!("aten::{}: {message}", self.op.to_string_lossy());
        Err(if error.kind == abi::error::LINALG { HostError::NoResult(message) } else { message.into() })
    }
}

/// A buffer of the program.
struct Memory {
    at: *const c_void,
    bytes: usize,
    dtype: ElementType,
}

impl Memory {
    /// The strided tensor in it, if it fits.
    fn tensor(&self, sizes: &[i64], strides: &[i64], offset: i64) -> Option<Tensor> {
        let dtype = match self.dtype {
            ElementType::F32 => DType::F32,
            ElementType::F64 => DType::F64,
            ElementType::C64 => DType::C64,
            ElementType::C128 => DType::C128,
            ElementType::S32 => DType::S32,
            ElementType::S64 => DType::S64,
            ElementType::U8 => DType::U8,
            ElementType::F16 => DType::F16,
            ElementType::Bf16 => DType::BF16,
            _ => return None,
        };
        let last = sizes.iter().zip(strides).try_fold(offset, |at, (&n, &step)| {
            let fits = n >= 0 && step >= 0;
            at.checked_add((n - 1).max(0).checked_mul(step)?).filter(|_| fits)
        })?;
        let count = (self.bytes / dtype.size_bytes()) as i64;
        (offset >= 0 && (last < count || sizes.contains(&0))).then_some(Tensor {
            slot: null_mut(),
            host: self.at,
            sizes: sizes.as_ptr(),
            strides: strides.as_ptr(),
            offset,
            ndim: sizes.len() as i32,
            dtype: dtype::code(dtype) as i16,
            device_type: abi::device::CPU,
            flags: 0,
            device_index: -1,
            reserved: 0,
        })
    }
}

const NOTHING: Tensor = Tensor {
    slot: null_mut(),
    host: null(),
    sizes: null(),
    strides: null(),
    offset: 0,
    ndim: 0,
    dtype: 0,
    device_type: abi::device::CPU,
    flags: abi::flag::UNDEFINED,
    device_index: -1,
    reserved: 0,
};

/// An argument with what its C form points to.
#[derive(Clone)]
enum Item<'a> {
    Tensor(Tensor),
    List(u32, &'a [i64]),
    Text(Vec<u8>),
    Word(u32, i64),
    Double(f64),
}

impl Item<'_> {
    fn flat(&self) -> Arg {
        let (tag, len, u) = match self {
            Item::Tensor(t) => (tag::TENSOR, 0, Payload { t }),
            Item::Text(text) => (tag::STR, text.len() as u32, Payload { s: text.as_ptr().cast() }),
            Item::List(tag, list) => (*tag, list.len() as u32, Payload { ints: list.as_ptr() }),
            Item::Word(tag, i) => (*tag, 0, Payload { i: *i }),
            Item::Double(d) => (tag::DOUBLE, 0, Payload { d: *d }),
        };
        Arg { tag, len, u }
    }
}

/// The number that an operand is.
fn number(arg: &HostArg<'_>) -> Option<Item<'static>> {
    match arg.values::<i64>() {
        Some(whole) => Some(Item::Word(tag::INT, *whole.first()?)),
        None => Some(Item::Double(*arg.values::<f64>()?.first()?)),
    }
}

/// Reads the words of a call, one after another; `None` where they make no sense.
struct Reader<'a> {
    words: &'a [i64],
}

impl<'a> Reader<'a> {
    fn word(&mut self) -> Option<i64> {
        let (&first, rest) = self.words.split_first()?;
        self.words = rest;
        Some(first)
    }

    fn count(&mut self) -> Option<usize> {
        usize::try_from(self.word()?).ok()
    }

    fn list(&mut self, n: usize) -> Option<&'a [i64]> {
        let (list, rest) = self.words.split_at_checked(n)?;
        self.words = rest;
        Some(list)
    }

    fn tensor(&mut self, buffers: &[Memory]) -> Option<Tensor> {
        let buffer = buffers.get(self.count()?)?;
        let rank = self.count()?;
        let (sizes, strides) = (self.list(rank)?, self.list(rank)?);
        buffer.tensor(sizes, strides, self.word()?)
    }

    /// What is said of parts.
    fn cut(&mut self) -> Option<Cut<'a>> {
        let rest = self.words.strip_prefix(&[word::PARTS])?;
        let saved = std::mem::replace(&mut self.words, rest);
        let cut = self.count().zip(self.counted()).map(|(step, dims)| Cut { step, dims });
        if cut.is_none() {
            self.words = saved; // not understood as an argument either
        }
        cut
    }

    /// Up to the word before the results.
    fn args(&mut self, buffers: &[Memory], values: &[HostArg<'_>]) -> Option<Vec<Item<'a>>> {
        let mut args = Vec::new();
        loop {
            args.push(match self.word()? {
                word::RESULTS => return Some(args),
                word::NONE => Item::Word(tag::NONE, 0),
                word::TENSOR => Item::Tensor(self.tensor(buffers)?),
                word::NUMBER => number(values.get(self.count()?)?)?,
                word::INT => Item::Word(tag::INT, self.word()?),
                word::FLOAT => Item::Double(f64::from_bits(self.word()? as u64)),
                word::BOOL => Item::Word(tag::BOOL, self.word()?),
                word::INTS => Item::List(tag::INTS, self.counted()?),
                word::BOOLS => Item::List(tag::BOOLS, self.counted()?),
                word::STR => Item::Text(self.counted()?.iter().map(|&b| b as u8).collect()),
                _ => return None,
            });
        }
    }

    fn counted(&mut self) -> Option<&'a [i64]> {
        let n = self.count()?;
        self.list(n)
    }

    fn results(&mut self, buffers: &[Memory]) -> Option<Vec<Tensor>> {
        let n = self.count()?;
        let mut results = Vec::new();
        for _ in 0..n {
            results.push(match self.word()? {
                word::NONE => NOTHING,
                word::TENSOR => self.tensor(buffers)?,
                _ => return None,
            });
        }
        Some(results)
    }
}
