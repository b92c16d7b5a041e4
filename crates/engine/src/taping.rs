//! Noting a recipe while a compiled graph is played.

use crate::config::{Mode, Switches};
use crate::error::{Refusal, Result};
use crate::inst::Inst;
use crate::recipe::{Argument, Layout, Recipe, Source, address};
use crate::shared::Shared;
use crate::site::Site;
use crate::stream::Stream;
use crate::tape::Tape;
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Value};
use crate::window::Window;
use oxitorch_capture::Reason;
use oxitorch_hlo::DType;
use std::sync::Arc;

impl Tape {
    /// A tape for these arguments; `None` where they are of a kind that no recipe can have.
    fn new(device: u16, args: &[TensorRef<'_>], w: &mut Window) -> Result<Option<Tape>, Refusal> {
        let mut tape = Tape { spoiled: false, ..Tape::spoiled(w.site) };
        for (i, t) in args.iter().enumerate() {
            let Some(layout) = Layout::of(t) else { return Ok(None) };
            let storage = match t.place {
                Place::Device(slot) if slot.device == device => {
                    let at = address(slot);
                    let known = tape.slots.iter().position(|s| *s == at);
                    let number = match known {
                        Some(number) => number,
                        None => {
                            let value = w.slot_value(slot, layout.dtype, &layout.sizes)?;
                            tape.slots.push(at);
                            tape.before.push(value);
                            tape.slots.len() - 1
                        }
                    };
                    Some(number as u32)
                }
                Place::Host(bytes) if t.contiguous && !t.conj && !t.neg => {
                    tape.host.insert(bytes.as_ptr() as usize, i as u32);
                    None
                }
                _ => return Ok(None),
            };
            tape.arguments.push(Argument { layout, storage });
        }
        for i in 0..tape.before.len() {
            let value = tape.before[i].clone();
            // Two storages with one value: an operand could be either.
            if tape.source(&value).is_some() {
                return Ok(None);
            }
            tape.know(&value, Source::Storage(i as u32));
        }
        Ok(Some(tape))
    }
}

impl Window {
    /// Whether this thread plays a graph.
    pub(crate) fn is_watched(&self) -> bool {
        self.tape.as_deref().is_some_and(Tape::is_here)
    }

    fn tape(&mut self) -> Option<&mut Tape> {
        self.tape.as_deref_mut().filter(|t| t.is_here() && !t.spoiled)
    }

    /// What is recorded depends on more than the graph.
    pub(crate) fn spoil(&mut self) {
        if let Some(tape) = self.tape() {
            tape.spoiled = true;
        }
    }

    /// Notes a number of the graph.
    pub(crate) fn note_number(&mut self, value: &Arc<Value>) {
        let Some(tape) = self.tape() else { return };
        match tape.source(value) {
            None => {
                tape.know(value, Source::Number(tape.numbers.len() as u32));
                tape.numbers.push(Held::new(value.clone()));
            }
            Some(Source::Number(_)) => {}
            Some(_) => tape.spoiled = true, // a storage holds the same number
        }
    }

    /// Notes a state of the default generator that an op uses.
    pub(crate) fn note_random(&mut self, value: &Arc<Value>, blocks: u64) {
        if let Some(tape) = self.tape() {
            tape.know(value, Source::Random(blocks));
        }
    }

    /// Notes a value that was copied from host memory.
    pub(crate) fn note_upload(&mut self, value: &Arc<Value>, bytes: &[u8]) {
        if let Some(tape) = self.tape()
            && let Some(argument) = tape.host_argument(value.ty.dtype, &value.ty.shape, bytes)
        {
            tape.know(value, Source::Host(argument));
        }
    }

    /// The number in a 0-d tensor of the host, as an operand.
    pub(crate) fn host_number(&mut self, dtype: DType, bytes: &[u8], wrapped: bool) -> Arc<Value> {
        let bytes = &bytes[..dtype.size_bytes()];
        let argument = match self.tape() {
            None => return self.number(dtype, bytes),
            Some(tape) => tape.host_argument(dtype, &[], bytes),
        };
        match argument {
            // Not one of the numbers that stay: the graph may have the same one, and that is always the same.
            Some(_) => {
                let value = Value::scalar(dtype, bytes);
                self.note_upload(&value, bytes);
                value
            }
            None => {
                if !wrapped {
                    self.spoil(); // the next call may find another number there
                }
                self.number(dtype, bytes)
            }
        }
    }

    /// Notes the instance that was recorded last.
    pub(crate) fn note(&mut self, inst: &Shared<Inst>) {
        let site = self.site;
        let Some(mut tape) = self.tape.take() else { return };
        if tape.is_here() && !tape.spoiled {
            let operands = &self.ops.operands;
            for &code in &operands[operands.len() - inst.operands.len()..] {
                match self.value(code).and_then(|v| tape.source(v)) {
                    Some(source) => tape.operands.push(source),
                    None => tape.spoiled = true,
                }
            }
            let offsets = &self.ops.offsets;
            tape.offsets.extend_from_slice(&offsets[offsets.len() - inst.offsets..]);
            tape.insts.push(inst.clone());
            tape.sites.push(if site == tape.site { Site::default() } else { site });
            for output in &self.produced[self.produced.len() - inst.outputs.len()..] {
                if let Some(value) = output {
                    tape.know(value, Source::Result(tape.results));
                }
                tape.results += 1;
            }
        }
        self.tape = Some(tape);
    }
}

impl Stream {
    /// This thread begins to play a graph on these arguments. False in debug mode, which looks at each op, and while
    /// another thread plays one.
    pub fn watch(&self, args: &[TensorRef<'_>], site: Site, switches: &Switches) -> Result<bool, Refusal> {
        let mut w = self.lock(site);
        if w.tape.is_some() || switches.mode == Mode::Debug {
            return Ok(false);
        }
        self.make_room(&mut w, site, switches)?;
        w.thread.options = switches.compiler_options;
        let tape = Tape::new(self.device, args, &mut w)?.unwrap_or_else(|| Tape::spoiled(site));
        w.tape = Some(Box::new(tape));
        Ok(true)
    }

    /// The graph was played; gives the recipe, if a later call can do with it.
    pub fn watched(
        &self,
        args: &[TensorRef<'_>],
        outputs: &[TensorRef<'_>],
        switches: &Switches,
    ) -> Result<Option<Recipe>> {
        let Some(tape) = self.unwatch(switches.mode)? else { return Ok(None) };
        let recipe = tape.recipe(self.device, args, outputs, switches);
        if recipe.is_some() {
            self.metrics().count(&self.metrics().recipes);
        }
        Ok(recipe)
    }

    /// This thread plays no graph any more.
    pub(crate) fn unwatch(&self, mode: Mode) -> Result<Option<Box<Tape>>> {
        let mut w = self.lock(Site::default());
        let tape = w.tape.take_if(|t| t.is_here());
        if tape.is_some() && mode == Mode::Strict {
            self.flush(&mut w, Reason::Mode)?;
        }
        Ok(tape)
    }
}
