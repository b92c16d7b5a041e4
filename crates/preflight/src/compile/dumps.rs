//! What XLA writes of its memory when it is asked to (`--xla_dump_to`), read: which buffers are alive when most are.
//!
//! Three text files belong to a program: the assignment of values to memory, their lifetimes in the order of execution,
//! and the optimized program, whose metadata say which recorded op an instruction comes from. libtpu writes them before it
//! says that a program is too large, so they are there for those programs as well.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::outcome::{AtPeak, Buffer, BufferPlace};

/// What XLA is told.
const TO: &str = "--xla_dump_to=";
const AS_TEXT: &str = "--xla_dump_hlo_as_text";

/// Where a child's dumps go: the flags for it, and the folder. Who has a folder of his own keeps it.
pub(crate) fn flags(own: &str, folder: &Path) -> (String, PathBuf) {
    let theirs = own.split_whitespace().find_map(|f| f.strip_prefix(TO));
    let to = theirs.map_or_else(|| folder.join("dumps"), PathBuf::from);
    let place = if theirs.is_some() { String::new() } else { format!("{TO}{} ", to.display()) };
    (format!("{own} {place}{AS_TEXT}").trim_start().to_owned(), to)
}

/// The module's text under a name of its own, so that its dumps are found among those of others.
pub(crate) fn named(text: &str, id: &str) -> String {
    let head = "module @";
    let Some(rest) = text.strip_prefix(head) else { return text.to_owned() };
    let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
    format!("{head}{}_{id}{}", &rest[..end], &rest[end..])
}

/// Buffers that are told apart.
const TOLD: usize = 512;

/// Reads what was written of a program, and removes it if it is ours. Nothing if it is not there or not understood.
pub(crate) fn read(dumps: &Path, id: &str, ours: bool) -> Option<AtPeak> {
    let mut files: Vec<PathBuf> = fs::read_dir(dumps)
        .ok()?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().contains(id)))
        .collect();
    // A folder of the user's may have files of earlier runs.
    files.sort_by_cached_key(|p| (p.metadata().and_then(|m| m.modified()).ok(), p.clone()));
    let text = |suffix: &str| {
        let file = files.iter().rfind(|f| f.to_string_lossy().ends_with(suffix))?;
        Some(String::from_utf8_lossy(&fs::read(file).ok()?).into_owned())
    };
    let assignment = text("after_optimizations-buffer-assignment.txt");
    let ranges = text("after_optimizations-live-range.txt");
    let program = text("after_optimizations.txt");
    if ours {
        for file in &files {
            // What stays goes with the folder.
            let _ = if file.is_dir() { fs::remove_dir_all(file) } else { fs::remove_file(file) };
        }
    }
    at_peak(&assignment?, ranges.as_deref(), &program?)
}

/// Memory that XLA has assigned.
#[derive(Debug)]
struct Allocation<'a> {
    place: Option<BufferPlace>,
    bytes: u64,
    is_output: bool,
    values: Vec<HloValue<'a>>,
}

/// A value in it.
#[derive(Clone, Copy, Debug)]
struct HloValue<'a> {
    /// Instruction, with the index of the result in braces if there are several.
    name: &'a str,
    shape: &'a str,
    bytes: u64,
    offset: u64,
}

impl HloValue<'_> {
    fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

fn number(text: &str) -> Option<u64> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark).map(|(_, rest)| rest)
}

/// `allocation 2: size 64, page 0, parameter 2, shape |s64[8]| at ShapeIndex {}, maybe-live-out:` and the lines below.
fn allocations(text: &str) -> Vec<Allocation<'_>> {
    let mut all: Vec<Allocation<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(line) = line.strip_prefix("allocation ") {
            let has = |mark: &str| line.contains(mark);
            // Other colors are other memories, such as that of the scalar unit.
            let elsewhere = has(", color ") || has("thread-local") || has("constant:") || has("is_tuple");
            let is_output = has("maybe-live-out") || has("output shape is");
            let place = match after(line, ", parameter ").and_then(number) {
                _ if elsewhere => None,
                Some(n) => Some(BufferPlace::Argument(n as u32)),
                None if is_output => Some(BufferPlace::Output),
                None => Some(BufferPlace::Temporary),
            };
            let bytes = after(line, "size ").and_then(number).unwrap_or(0);
            all.push(Allocation { place, bytes, is_output, values: Vec::new() });
        } else if let (Some(value), Some(last)) = (value(line), all.last_mut()) {
            last.values.push(value);
        } else if line.is_empty() && !all.is_empty() {
            break; // what comes then says the same by value
        }
    }
    all
}

/// ` value: <2861 fusion.6{1} @0> (size=32768,offset=0): s32[64,64]{1,0:T(8,128)}`
fn value(line: &str) -> Option<HloValue<'_>> {
    let (_, rest) = line.strip_prefix(" value: <")?.split_once(' ')?;
    let (name, rest) = rest.split_once(" @")?;
    let (numbers, shape) = after(rest, "(size=")?.split_once("): ")?;
    let (bytes, offset) = numbers.split_once(",offset=")?;
    let name = name.strip_suffix("{}").unwrap_or(name);
    Some(HloValue { name, shape, bytes: bytes.parse().ok()?, offset: offset.parse().ok()? })
}

/// First and last instruction of each value's life.
fn lifetimes(text: &str) -> HashMap<&str, (u64, u64)> {
    let lines = text.lines().skip_while(|l| l.trim() != "BufferLiveRange:").skip(1);
    let one = |line: &'_ str| -> Option<_> {
        let (name, range) = line.trim().rsplit_once(':')?;
        let (start, end) = range.split_once('-')?;
        Some((name.len(), (start.parse().ok()?, end.parse().ok()?)))
    };
    let mut all = HashMap::new();
    for line in lines {
        let Some((len, range)) = one(line) else { break };
        let name = &line.trim()[..len];
        all.insert(name.strip_suffix("{}").unwrap_or(name), range);
    }
    all
}

/// An instruction of the optimized program.
#[derive(Debug, Default)]
struct Instruction<'a> {
    opcode: &'a str,
    operands: Vec<&'a str>,
    /// The recorded op in its metadata.
    op: Option<u32>,
    /// The fused computation.
    calls: Option<&'a str>,
    /// Of a get-tuple-element.
    index: Option<u64>,
    /// Its place in the text, which is in the order of execution.
    at: u64,
}

/// The optimized program.
#[derive(Debug, Default)]
struct Instructions<'a> {
    by_name: HashMap<&'a str, Instruction<'a>>,
    /// The last instruction of each computation.
    roots: HashMap<&'a str, &'a str>,
    readers: HashMap<&'a str, Vec<&'a str>>,
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// Names behind a `%`.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split('%').skip(1).map(|t| t.find(|c| !is_name(c)).map_or(t, |end| &t[..end]))
}

impl<'a> Instructions<'a> {
    fn parse(text: &'a str) -> Instructions<'a> {
        let mut all = Instructions::default();
        let mut computation = "";
        for (at, line) in text.lines().enumerate() {
            if !line.starts_with(' ') {
                computation = names(line).next().unwrap_or("");
                continue;
            }
            let (root, line) = match line.trim_start().strip_prefix("ROOT ") {
                Some(rest) => (true, rest),
                None => (false, line.trim_start()),
            };
            let Some((name, mut instruction)) = instruction(line) else { continue };
            instruction.at = at as u64;
            if root {
                all.roots.insert(computation, name);
            }
            for &operand in &instruction.operands {
                all.readers.entry(operand).or_default().push(name);
            }
            all.by_name.insert(name, instruction);
        }
        all
    }

    /// The recorded op that makes a value, or what the value is a copy of.
    fn op(&self, name: &str, index: Option<u64>, depth: u32) -> Option<u32> {
        let i = self.by_name.get(name).filter(|_| depth < DEPTH)?;
        if let Some(&root) = i.calls.and_then(|c| self.roots.get(c)) {
            let fused = self.by_name.get(root)?;
            let part = index.and_then(|n| fused.operands.get(n as usize)).filter(|_| fused.opcode == "tuple");
            let made = self.op(part.unwrap_or(&root), None, depth + 1);
            return made.or(i.op);
        }
        let from = if i.opcode == "tuple" { index.unwrap_or(0) as usize } else { 0 };
        let pass = || self.op(i.operands.get(from)?, i.index, depth + 1);
        i.op.or_else(pass)
    }

    /// First and last instruction of a value's life, where XLA did not write them: the CPU's does not.
    fn lifetime(&self, value: &str) -> Option<(u64, u64)> {
        let (name, index) = parts(value);
        let start = self.by_name.get(name)?.at;
        Some((start, self.last_use(name, index, 0).unwrap_or(start)))
    }

    fn last_use(&self, name: &str, index: Option<u64>, depth: u32) -> Option<u64> {
        let readers = self.readers.get(name).filter(|_| depth < DEPTH)?;
        let one = |&reader: &&str| {
            let i = self.by_name.get(reader)?;
            match i.opcode {
                "get-tuple-element" if index.is_some() && i.index != index => None,
                "get-tuple-element" | "bitcast" => self.last_use(reader, None, depth + 1).or(Some(i.at)),
                _ => Some(i.at),
            }
        };
        readers.iter().filter_map(one).max()
    }

    /// The last recorded op that reads a value.
    fn last_reader(&self, name: &str, index: Option<u64>, depth: u32) -> Option<u32> {
        let readers = self.readers.get(name).filter(|_| depth < DEPTH)?;
        let one = |&reader: &&str| {
            let i = self.by_name.get(reader)?;
            match i.opcode {
                "get-tuple-element" if index.is_some() && i.index != index => None,
                "get-tuple-element" | "bitcast" | "copy" => {
                    self.last_reader(reader, None, depth + 1).or(i.op)
                }
                _ => self.op(reader, None, 0),
            }
        };
        readers.iter().filter_map(one).max()
    }
}

/// Steps from an instruction to what says where it comes from.
const DEPTH: u32 = 16;

/// `%copy.25 = f32[64,64]{1,0} copy(%a), metadata={op_name="aten::view#8" stack_frame_id=66}`
fn instruction(line: &str) -> Option<(&str, Instruction<'_>)> {
    let (name, rest) = line.strip_prefix('%')?.split_once(" = ")?;
    // A tuple's type has spaces and braces; the opcode is what stands before the first parenthesis behind the type.
    let mut depth = 0;
    let end = rest.find(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ' ' && depth == 0
    })?;
    let (opcode, rest) = rest[end + 1..].split_once('(')?;
    let (operands, attributes) = rest.split_once(')').unwrap_or((rest, ""));
    let op = after(attributes, "op_name=\"").and_then(|s| s.split('"').next()).and_then(recorded);
    let calls = after(attributes, "calls=%").and_then(|s| s.split(|c| !is_name(c)).next());
    let index = after(attributes, " index=").and_then(number);
    Some((name, Instruction { opcode, operands: names(operands).collect(), op, calls, index, at: 0 }))
}

/// The number of a recorded op in the name that the engine gave it: `aten::mm#17`.
fn recorded(op_name: &str) -> Option<u32> {
    after(op_name, "#").and_then(number).map(|n| n as u32)
}

/// The values of temporaries that are alive at once and lie in different places, when they are most.
fn most<'a, 'b>(values: &'b [(HloValue<'a>, (u64, u64))]) -> Vec<&'b HloValue<'a>> {
    let mut events: Vec<(u64, i64)> = Vec::new();
    for (v, (start, end)) in values {
        events.push((*start, v.bytes as i64));
        events.push((end + 1, -(v.bytes as i64)));
    }
    events.sort_unstable();
    let mut sums: Vec<(i64, u64)> = Vec::new();
    let mut sum = 0;
    for (i, (time, change)) in events.iter().enumerate() {
        sum += change;
        if events.get(i + 1).is_none_or(|(next, _)| next != time) {
            sums.push((sum, *time));
        }
    }
    // Values share memory where one takes that of another, so that the sums are only about right.
    sums.sort_unstable_by_key(|s| std::cmp::Reverse(*s));
    let at = |time: u64| apart(values.iter().filter(|(_, (s, e))| (*s..=*e).contains(&time)).map(|(v, _)| v));
    let total = |all: &Vec<&HloValue<'a>>| all.iter().map(|v| v.bytes).sum::<u64>();
    sums.iter().take(TRIED).map(|(_, time)| at(*time)).max_by_key(total).unwrap_or_default()
}

/// Moments that are looked at.
const TRIED: usize = 32;

/// Values that do not overlap, the largest first.
fn apart<'a, 'b: 'a>(values: impl Iterator<Item = &'a HloValue<'b>>) -> Vec<&'a HloValue<'b>> {
    let mut all: Vec<&HloValue<'b>> = values.filter(|v| v.bytes > 0).collect();
    all.sort_by_key(|v| std::cmp::Reverse(v.bytes));
    let mut taken: std::collections::BTreeMap<u64, u64> = std::collections::BTreeMap::new();
    all.retain(|v| {
        let before = taken.range(..v.end()).next_back();
        let free = before.is_none_or(|(_, end)| *end <= v.offset);
        if free {
            taken.insert(v.offset, v.end());
        }
        free
    });
    all
}

fn at_peak(assignment: &str, ranges: Option<&str>, program: &str) -> Option<AtPeak> {
    let allocations = allocations(assignment);
    let lifetimes = ranges.map(lifetimes);
    let instructions = Instructions::parse(program);
    let mut out = AtPeak::default();
    for a in &allocations {
        let Some(place) = a.place else { continue };
        match place {
            BufferPlace::Argument(_) => out.memory.arguments += a.bytes,
            BufferPlace::Output => {}
            BufferPlace::Temporary => out.memory.temporaries += a.bytes,
        }
        if a.is_output {
            out.memory.outputs += a.bytes;
            out.memory.aliased += if place == BufferPlace::Output { 0 } else { a.bytes };
        }
        let alive: Vec<&HloValue<'_>> = if place == BufferPlace::Temporary {
            let range = |v: &HloValue<'_>| match &lifetimes {
                Some(all) => all.get(v.name).copied(),
                None => instructions.lifetime(v.name),
            };
            let known = a.values.iter().filter_map(|v| Some((*v, range(v)?)));
            let values: Vec<_> = known.collect();
            let alive: Vec<HloValue<'_>> = most(&values).into_iter().copied().collect();
            let sum: u64 = alive.iter().map(|v| v.bytes).sum();
            out.gaps_bytes += a.bytes.saturating_sub(sum);
            out.buffers.extend(alive.iter().map(|v| buffer(v, place, &instructions)));
            continue;
        } else {
            // One at a time, of which the last is what the program leaves there.
            a.values.iter().max_by_key(|v| v.bytes).into_iter().collect()
        };
        out.buffers
            .extend(alive.into_iter().map(|v| Buffer { bytes: a.bytes, ..buffer(v, place, &instructions) }));
    }
    let m = &mut out.memory;
    m.peak = m.arguments + m.outputs + m.temporaries - m.aliased;
    out.buffers.sort_by_key(|b| std::cmp::Reverse(b.bytes));
    out.rest_bytes = out.buffers.iter().skip(TOLD).map(|b| b.bytes).sum();
    out.buffers.truncate(TOLD);
    (!allocations.is_empty()).then_some(out)
}

/// The instruction of a value, and which of its results it is.
fn parts(value: &str) -> (&str, Option<u64>) {
    match value.split_once('{') {
        Some((name, index)) => (name, number(index)),
        None => (value, None),
    }
}

fn buffer(v: &HloValue<'_>, place: BufferPlace, instructions: &Instructions<'_>) -> Buffer {
    let (name, index) = parts(v.name);
    Buffer {
        place,
        name: v.name.to_owned(),
        shape: v.shape.to_owned(),
        bytes: v.bytes,
        op: instructions.op(name, index, 0),
        last_reader: instructions.last_reader(name, index, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASSIGNMENT: &str = "BufferAssignment:
allocation 0: size 4096, page 0, parameter 1, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <1 Arg_1.0 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <9 add.1 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 1: size 512, page 0, parameter 0, shape |f32[]| at ShapeIndex {}:
 value: <0 Arg_0.0 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 2: size 512, page 0, thread-local:
 value: <3 param.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 3: size 8192, page 0, maybe-live-out:
 value: <8 copy.2 @0> (size=8192,offset=0): f32[16,3]{1,0:T(8,128)}
allocation 4: size 2048, color 6, page 0, preallocated-temp:
 value: <4 scalar @6> (size=512,offset=0): f32[]{:T(128)S(6)}
allocation 5: size 16384, page 0, preallocated-temp:
 value: <5 fusion.1{} @0> (size=512,offset=15872): (f32[8,128]{1,0:T(8,128)}, f32[8]{0})
 value: <6 fusion.1{1} @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <7 exp.1 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
 value: <2 dot.1 @0> (size=8192,offset=4096): f32[16,128]{1,0:T(8,128)}

Used values:
<0 Arg_0.0 @0>
 value: <2 dot.1 @0> (size=8192,offset=4096): f32[16,128]{1,0:T(8,128)}
";
    const RANGES: &str = "HloLiveRange (max 9):
  InstructionSequence:
    0:Arg_0.0
  BufferLiveRange:
    Arg_0.0{}:0-9
    fusion.1{}:1-4
    fusion.1{1}:1-4
    dot.1{}:3-7
    exp.1{}:4-5
    copy.2{}:6-9
  Live ranges at 4 (peak):
    dot.1{}: 8192 bytes (cumulative: 8192 bytes)
";
    const PROGRAM: &str = "HloModule mm
%fused (p.1: f32[]) -> (f32[8], f32[8,128]) {
  %mul.1 = f32[8,128]{1,0:T(8,128)} multiply(%p.1, %p.1), metadata={op_name=\"aten::mul#3\"}
  ROOT %tuple.1 = (f32[8]{0}, f32[8,128]{1,0}) tuple(%p.1, %mul.1)
}
ENTRY %main (Arg_0.0: f32[], Arg_1.0: f32[8,128]) -> f32[8,128] {
  %Arg_0.0 = f32[]{:T(128)} parameter(0)
  %fusion.1 = (f32[8]{0}, f32[8,128]{1,0:T(8,128)}) fusion(%Arg_0.0), kind=kLoop, calls=%fused, metadata={op_name=\"aten::sum#4\"}
  %gte.1 = f32[8,128]{1,0} get-tuple-element(%fusion.1), index=1
  %gte.0 = f32[8]{0} get-tuple-element(%fusion.1), index=0
  %dot.1 = f32[16,128]{1,0:T(8,128)} dot(%gte.1, %gte.1), metadata={op_name=\"aten::mm#5\" stack_frame_id=2}
  %exp.1 = f32[8,128]{1,0:T(8,128)} exponential(%gte.1), metadata={op_name=\"aten::exp#9\"}
  %neg.1 = f32[8]{0} negate(%gte.0), metadata={op_name=\"aten::neg#40\"}
  %copy.2 = f32[16,3]{1,0:T(8,128)} copy(%dot.1)
  ROOT %add.1 = f32[8,128]{1,0:T(8,128)} add(%exp.1, %dot.1), metadata={op_name=\"aten::add.Tensor#12\"}
}
";

    #[test]
    fn buffers_are_those_that_are_alive_when_most_are() {
        let peak = at_peak(ASSIGNMENT, Some(RANGES), PROGRAM).unwrap();
        let told: Vec<_> =
            peak.buffers.iter().map(|b| (b.place, b.name.as_str(), b.bytes, b.op, b.last_reader)).collect();
        let expected = [
            (BufferPlace::Output, "copy.2", 8192, Some(5), None),
            (BufferPlace::Temporary, "dot.1", 8192, Some(5), Some(12)),
            (BufferPlace::Argument(1), "add.1", 4096, Some(12), None),
            (BufferPlace::Temporary, "fusion.1{1}", 4096, Some(3), Some(9)),
            (BufferPlace::Argument(0), "Arg_0.0", 512, None, Some(4)),
            (BufferPlace::Temporary, "fusion.1", 512, Some(4), Some(40)),
        ];
        assert_eq!(told, expected);
        assert_eq!(peak.buffers[1].shape, "f32[16,128]{1,0:T(8,128)}");
        assert_eq!((peak.rest_bytes, peak.gaps_bytes), (0, 16384 - 8192 - 4096 - 512));
        let m = peak.memory;
        assert_eq!((m.arguments, m.outputs, m.aliased, m.temporaries), (4608, 12288, 4096, 16384));
        assert_eq!(m.peak, 4608 + 12288 - 4096 + 16384);
        // Without lifetimes, those that follow from the program.
        let own = at_peak(ASSIGNMENT, None, PROGRAM).unwrap();
        let told = |all: &AtPeak| all.buffers.iter().map(|b| b.name.clone()).collect::<Vec<_>>();
        assert_eq!(told(&own)[..4], told(&peak)[..4]);
    }

    #[test]
    fn flags_of_the_user_stay() {
        let folder = Path::new("/a");
        let ours = ("--xla_dump_to=/a/dumps --xla_dump_hlo_as_text".to_owned(), PathBuf::from("/a/dumps"));
        assert_eq!(flags("", folder), ours);
        let (text, to) = flags("--xla_x=1 --xla_dump_to=/b", folder);
        assert_eq!(text, "--xla_x=1 --xla_dump_to=/b --xla_dump_hlo_as_text");
        assert_eq!(to, Path::new("/b"));
    }

    #[test]
    fn modules_have_names_of_their_own() {
        assert_eq!(named("module @mm__add {\n}", "12ab"), "module @mm__add_12ab {\n}");
        assert_eq!(named("module {}", "12ab"), "module {}");
    }
}
