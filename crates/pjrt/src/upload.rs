//! Buffers of what the host has, and of memory that is on a device already.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::api::{call, non_null, slot};
use crate::buffer::{Buffer, Home};
use crate::client::Client;
use crate::device::Device;
use crate::element::{BufferType, ElementType};
use crate::error::{Code, Error, Result, err};
use crate::event::Event;

impl Client {
    /// Copies dense row-major bytes to a device. The copy of `data` is done when this returns.
    pub fn buffer_from_host(
        self: &Arc<Self>,
        data: &[u8],
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Buffer> {
        let home = self.new_home(data.len(), dtype, dims, device)?;
        // An empty slice dangles; some plugins look at the address even then.
        static NOTHING: [u64; 8] = [0; 8];
        let data: *const c_void =
            if data.is_empty() { NOTHING.as_ptr().cast() } else { data.as_ptr().cast() };
        let ty = home.ty(0);
        let mut args = Args::<sys::PJRT_Client_BufferFromHostBuffer_Args>::new();
        args.client = self.ptr();
        args.data = data;
        args.type_ = ty.dtype.code();
        args.dims = ty.dims.as_ptr();
        args.num_dims = ty.dims.len();
        args.host_buffer_semantics = sys::PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
        args.device = device.ptr.as_ptr();
        // SAFETY: `data` has the bytes that the type says, which are read during the call alone; so live the dimensions.
        unsafe { call!(self.api(), PJRT_Client_BufferFromHostBuffer, args) }?;
        drop(Event::from_raw(*self.api(), args.done_with_host_buffer, None)); // has happened
        let ptr = non_null("PJRT_Client_BufferFromHostBuffer", args.buffer)?;
        Ok(Buffer::from_raw(ptr, home, 0, device.index()))
    }

    /// Makes a buffer in the host's memory and has `fill` write its bytes, dense and row-major. Before that they are
    /// whatever was there. It may be donated. Nothing, and `fill` is not called, where the
    /// device has memory of its own or the plugin makes no such buffers.
    pub fn buffer_filled(
        self: &Arc<Self>,
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Option<Buffer>> {
        let home = self.home_of(dtype, dims, device)?;
        if !home.is_host_memory(0) {
            return Ok(None);
        }
        let Some(mut buffer) = self.uninitialized_buffer(home, device)? else { return Ok(None) };
        fill(&mut buffer.bytes_mut()?);
        Ok(Some(buffer))
    }

    /// A buffer with any bytes, if the plugin makes such: nobody else may see it before it is written.
    fn uninitialized_buffer(&self, home: Arc<Home>, device: &Device) -> Result<Option<Buffer>> {
        let mut args = Args::<sys::PJRT_Client_CreateUninitializedBuffer_Args>::new();
        args.client = self.ptr();
        args.shape_dims = home.ty(0).dims.as_ptr();
        args.shape_num_dims = home.ty(0).dims.len();
        args.shape_element_type = home.ty(0).dtype.code();
        args.device = device.ptr.as_ptr();
        // SAFETY: client and device are live, the dimensions live through the call.
        match unsafe { call!(self.api(), PJRT_Client_CreateUninitializedBuffer, args) } {
            Err(Error::Unsupported { .. } | Error::Status { code: Code::UNIMPLEMENTED, .. }) => Ok(None),
            Err(e) => Err(e),
            Ok(()) => {
                let ptr = non_null("PJRT_Client_CreateUninitializedBuffer", args.buffer)?;
                Ok(Some(Buffer::from_raw(ptr, home, 0, device.index())))
            }
        }
    }

    fn home_of(self: &Arc<Self>, dtype: ElementType, dims: &[i64], device: &Device) -> Result<Arc<Home>> {
        self.check_device(device)?;
        Home::one(self.clone(), BufferType::new(dtype, dims))
    }

    fn new_home(
        self: &Arc<Self>,
        given: usize,
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Arc<Home>> {
        let home = self.home_of(dtype, dims, device)?;
        let bytes = home.bytes(0);
        if given != bytes {
            let ty = home.ty(0);
            return Err(err::invalid(format!("buffer_from_host: {ty} has {bytes} bytes, got {given}")));
        }
        Ok(home)
    }

    /// A buffer over memory that is on the device already. `on_delete` is called when the buffer is gone.
    ///
    /// # Safety
    /// `address` is device memory of `device` with the bytes of a dense row-major value of this type, and stays valid
    /// until `on_delete` is called.
    pub unsafe fn view_of_device_memory(
        self: &Arc<Self>,
        address: usize,
        ty: BufferType,
        device: &Device,
        on_delete: impl FnOnce() + Send + 'static,
    ) -> Result<Buffer> {
        self.check_device(device)?;
        if address == 0 {
            return Err(err::invalid("view_of_device_memory: null address"));
        }
        let home = Home::one(self.clone(), ty)?;
        let create = slot!(self.api(), PJRT_Client_CreateViewOfDeviceBuffer)?;
        // Never null: plugins call it without looking.
        let callback = Box::into_raw(Box::new(Box::new(on_delete) as Box<dyn FnOnce() + Send>));
        let mut args = Args::<sys::PJRT_Client_CreateViewOfDeviceBuffer_Args>::new();
        args.client = self.ptr();
        args.device_buffer_ptr = address as *mut c_void;
        args.dims = home.ty(0).dims.as_ptr();
        args.num_dims = home.ty(0).dims.len();
        args.element_type = home.ty(0).dtype.code();
        args.device = device.ptr.as_ptr();
        args.on_delete_callback = Some(run_on_delete);
        args.on_delete_callback_arg = callback.cast();
        // SAFETY: the memory is the caller's promise; the plugin calls the callback once, with the box.
        let error = unsafe { create(args.as_mut_ptr()) };
        if !error.is_null() {
            // A plugin that fails has not kept the callback.
            // SAFETY: the box is still ours.
            drop(unsafe { Box::from_raw(callback) });
            return Err(self.api().take_error("PJRT_Client_CreateViewOfDeviceBuffer", error));
        }
        let ptr = non_null("PJRT_Client_CreateViewOfDeviceBuffer", args.buffer)?;
        Ok(Buffer::from_raw(ptr, home, 0, device.index()))
    }
}

unsafe extern "C" fn run_on_delete(_address: *mut c_void, user_arg: *mut c_void) {
    // SAFETY: `user_arg` is the box that `view_of_device_memory` leaked, given back exactly once.
    let callback = unsafe { Box::from_raw(user_arg.cast::<Box<dyn FnOnce() + Send>>()) };
    // A panic must not cross into C; the panic hook has printed it.
    let _ = catch_unwind(AssertUnwindSafe(callback));
}
