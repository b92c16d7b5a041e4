//! A compiled program that is not loaded on devices: what can be asked of it.

use std::ptr::NonNull;

use oxitorch_pjrt_sys as sys;
use sys::{Args, CStruct};

use crate::api::{Api, call, destroy, non_null, slice, text};
use crate::element::{BufferType, Dims, ElementType};
use crate::envelope;
use crate::error::{Code, Error, Result};
use crate::named_value::{self, Attributes};

/// A compiled program. An `Executable` has one; ahead-of-time compilation gives one alone.
pub struct Compiled {
    api: Api,
    ptr: NonNull<sys::PJRT_Executable>,
}

// SAFETY: PJRT executables are immutable and may be asked from any thread.
unsafe impl Send for Compiled {}
// SAFETY: as above.
unsafe impl Sync for Compiled {}

/// Memory that a program needs on each device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CompiledMemoryStats {
    /// The program itself.
    pub generated_code: i64,
    /// Arguments.
    pub argument: i64,
    /// Results.
    pub output: i64,
    /// Arguments whose memory results reuse.
    pub alias: i64,
    /// Temporaries.
    pub temp: i64,
    /// The most in use at once, where the plugin says it (0 if not).
    pub peak: i64,
    /// The program itself, on the host.
    pub host_generated_code: i64,
    /// Arguments in host memory.
    pub host_argument: i64,
    /// Results in host memory.
    pub host_output: i64,
    /// Arguments in host memory that results reuse.
    pub host_alias: i64,
    /// Temporaries in host memory.
    pub host_temp: i64,
}

/// A program after optimisation.
#[derive(Clone, Debug)]
pub struct OptimizedProgram {
    /// The plugin's name of the format, for instance `hlo_with_config`.
    pub format: String,
    /// The bytes.
    pub code: Vec<u8>,
}

impl Compiled {
    /// # Safety
    /// `ptr` is a live executable of `api`'s plugin, and becomes this value's.
    pub(crate) unsafe fn from_raw(api: Api, ptr: NonNull<sys::PJRT_Executable>) -> Compiled {
        Compiled { api, ptr }
    }

    /// The program's name: the module's.
    pub fn name(&self) -> Result<String> {
        let mut args = Args::<sys::PJRT_Executable_Name_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live and owns the name, which is copied.
        unsafe {
            call!(&self.api, PJRT_Executable_Name, args)?;
            Ok(text(args.executable_name, args.executable_name_size))
        }
    }

    /// The types of the results on one device.
    pub fn output_types(&self) -> Result<Vec<BufferType>> {
        let ptr = self.ptr.as_ptr();
        let mut count = Args::<sys::PJRT_Executable_NumOutputs_Args>::new();
        let mut types = Args::<sys::PJRT_Executable_OutputElementTypes_Args>::new();
        let mut dims = Args::<sys::PJRT_Executable_OutputDimensions_Args>::new();
        count.executable = ptr;
        types.executable = ptr;
        dims.executable = ptr;
        // SAFETY: the executable is live and owns the arrays, which have the lengths that it says.
        let (types, ranks, mut dims) = unsafe {
            call!(&self.api, PJRT_Executable_NumOutputs, count)?;
            call!(&self.api, PJRT_Executable_OutputElementTypes, types)?;
            call!(&self.api, PJRT_Executable_OutputDimensions, dims)?;
            let ranks = slice(dims.dim_sizes, dims.num_outputs);
            let types = slice(types.output_types, types.num_output_types);
            (types, ranks, slice(dims.dims, ranks.iter().sum()))
        };
        if types.len() != count.num_outputs || ranks.len() != count.num_outputs {
            return Err(Error::Status {
                call: "PJRT_Executable_OutputDimensions",
                code: Code::INTERNAL,
                message: format!(
                    "the plugin says {} results, {} types and {} shapes",
                    count.num_outputs,
                    types.len(),
                    ranks.len()
                ),
            });
        }
        let mut out = Vec::with_capacity(ranks.len());
        for (&code, &rank) in types.iter().zip(ranks) {
            let (these, rest) = dims.split_at(rank);
            out.push(BufferType::new(ElementType::try_from(code)?, Dims::from_slice(these)));
            dims = rest;
        }
        Ok(out)
    }

    /// Number of replicas and of partitions.
    pub fn replicas_and_partitions(&self) -> Result<(usize, usize)> {
        let mut r = Args::<sys::PJRT_Executable_NumReplicas_Args>::new();
        let mut p = Args::<sys::PJRT_Executable_NumPartitions_Args>::new();
        r.executable = self.ptr.as_ptr();
        p.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live.
        unsafe {
            call!(&self.api, PJRT_Executable_NumReplicas, r)?;
            call!(&self.api, PJRT_Executable_NumPartitions, p)?;
        }
        Ok((r.num_replicas, p.num_partitions))
    }

    /// Bytes of machine code.
    pub fn code_bytes(&self) -> Result<i64> {
        let mut args = Args::<sys::PJRT_Executable_SizeOfGeneratedCodeInBytes_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live.
        unsafe { call!(&self.api, PJRT_Executable_SizeOfGeneratedCodeInBytes, args) }?;
        Ok(args.size_in_bytes)
    }

    /// The plugin's estimate of cost: `flops`, `bytes accessed` and more, by its names.
    pub fn cost_analysis(&self) -> Result<Attributes> {
        let mut args = Args::<sys::PJRT_Executable_GetCostAnalysis_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live and owns the properties, which are copied.
        unsafe {
            call!(&self.api, PJRT_Executable_GetCostAnalysis, args)?;
            Ok(named_value::from_c(args.properties, args.num_properties))
        }
    }

    /// Memory that it needs.
    pub fn memory_stats(&self) -> Result<CompiledMemoryStats> {
        let mut a = Args::<sys::PJRT_Executable_GetCompiledMemoryStats_Args>::new();
        a.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live.
        unsafe { call!(&self.api, PJRT_Executable_GetCompiledMemoryStats, a) }?;
        Ok(CompiledMemoryStats {
            generated_code: a.generated_code_size_in_bytes,
            argument: a.argument_size_in_bytes,
            output: a.output_size_in_bytes,
            alias: a.alias_size_in_bytes,
            temp: a.temp_size_in_bytes,
            peak: a.peak_memory_in_bytes,
            host_generated_code: a.host_generated_code_size_in_bytes,
            host_argument: a.host_argument_size_in_bytes,
            host_output: a.host_output_size_in_bytes,
            host_alias: a.host_alias_size_in_bytes,
            host_temp: a.host_temp_size_in_bytes,
        })
    }

    /// The program as the compiler left it.
    pub fn optimized_program(&self) -> Result<OptimizedProgram> {
        let mut program = sys::PJRT_Program::sized();
        let mut args = Args::<sys::PJRT_Executable_OptimizedProgram_Args>::new();
        args.executable = self.ptr.as_ptr();
        args.program = &mut program;
        // SAFETY: the executable is live; the first call, with null code, asks for the size, and the second writes that
        // many bytes into `code`. The format's text is static.
        unsafe {
            call!(&self.api, PJRT_Executable_OptimizedProgram, args)?;
            let mut code = vec![0u8; program.code_size];
            program.code = code.as_mut_ptr().cast();
            if !code.is_empty() {
                call!(&self.api, PJRT_Executable_OptimizedProgram, args)?;
            }
            Ok(OptimizedProgram { format: text(program.format, program.format_size), code })
        }
    }

    /// Bytes from which the same plugin, on the same kind of machine, can load the program again. They begin with a
    /// header that says which plugin that is, and a checksum.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        let mut args = Args::<sys::PJRT_Executable_Serialize_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live; the bytes are copied before the deleter that came with them runs.
        unsafe {
            call!(&self.api, PJRT_Executable_Serialize, args)?;
            let payload = slice(args.serialized_bytes.cast::<u8>(), args.serialized_bytes_size);
            let bytes = envelope::wrap(&self.api, payload);
            if let Some(delete) = args.serialized_executable_deleter {
                delete(args.serialized_executable);
            }
            Ok(bytes)
        }
    }

    /// The plugin's fingerprint of the program. It ignores compile options: no cache key.
    pub fn fingerprint(&self) -> Result<Vec<u8>> {
        let mut args = Args::<sys::PJRT_Executable_Fingerprint_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is live and owns the bytes, which are copied.
        unsafe {
            call!(&self.api, PJRT_Executable_Fingerprint, args)?;
            Ok(slice(args.executable_fingerprint.cast::<u8>(), args.executable_fingerprint_size).to_vec())
        }
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_Executable_Destroy_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is ours and not used after this.
        unsafe { destroy!(&self.api, PJRT_Executable_Destroy, args) };
    }
}

/// The compiled program behind a loaded one.
///
/// # Safety
/// `loaded` is a live loaded executable of `api`'s plugin.
pub(crate) unsafe fn of_loaded(api: Api, loaded: NonNull<sys::PJRT_LoadedExecutable>) -> Result<Compiled> {
    let mut args = Args::<sys::PJRT_LoadedExecutable_GetExecutable_Args>::new();
    args.loaded_executable = loaded.as_ptr();
    // SAFETY: passed on to the caller; the executable returned is a new object that the caller owns.
    unsafe {
        call!(&api, PJRT_LoadedExecutable_GetExecutable, args)?;
        let ptr = non_null("PJRT_LoadedExecutable_GetExecutable", args.executable)?;
        Ok(Compiled::from_raw(api, ptr))
    }
}
