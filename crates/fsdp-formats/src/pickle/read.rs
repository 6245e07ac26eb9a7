//! The interpreter of opcodes.

use std::borrow::Cow;

use super::error::{PickleError, PickleErrorKind};
use super::node::{
    FALSE, NONE, Node, NodeId, OpaqueNode, Pickle, TRUE, TupleNode, arena_position, own_node,
    small_int,
};
use crate::budget::Budget;
use crate::limits::{
    MAX_INTEGER_BYTES, MAX_MEMO_GAP, MAX_PICKLE_BYTES, PICKLE_FACTOR, check_limit,
};

/// The most nodes for which memory is reserved before the first opcode.
const MAX_RESERVED_NODES: usize = 1 << 16;

/// Parses one pickle. Bytes after its `STOP` are ignored, as Python does.
pub fn parse(bytes: &[u8]) -> Result<Pickle<'_>, PickleError> {
    parse_within(bytes, Budget::new(bytes.len() as u64, PICKLE_FACTOR))
}

/// Parses one pickle, with a budget for its nodes and for the values that are built from them.
pub(crate) fn parse_within(bytes: &[u8], budget: Budget) -> Result<Pickle<'_>, PickleError> {
    let limit = MAX_PICKLE_BYTES.min(u64::from(u32::MAX));
    check_limit("pickle length", bytes.len() as u64, limit)
        .map_err(|beyond| PickleErrorKind::from(beyond).at(0))?;
    // A checkpoint's metadata has about this many nodes, and as many items of tuples.
    let nodes = (bytes.len() / 16).min(MAX_RESERVED_NODES);
    let mut machine = Machine {
        bytes,
        position: 0,
        op_offset: 0,
        pickle: Pickle {
            nodes: Vec::with_capacity(nodes),
            offsets: Vec::with_capacity(nodes),
            items: Vec::with_capacity(nodes),
            root: NONE,
            end: 0,
            budget,
        },
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        copied: 0,
    };
    machine.pickle.root = machine.run().map_err(|kind| kind.at(machine.op_offset))?;
    machine.pickle.end = machine.position;
    Ok(machine.pickle)
}

/// The result of one opcode. Its error does not have a position yet.
pub(super) type Result<T, E = PickleErrorKind> = std::result::Result<T, E>;

/// The interpreter: a stack machine whose values are nodes.
pub(super) struct Machine<'a> {
    pub(super) bytes: &'a [u8],
    position: usize,
    /// The position of the current opcode.
    op_offset: usize,
    /// The nodes that have been built so far.
    pub(super) pickle: Pickle<'a>,
    stack: Vec<NodeId>,
    /// Stack heights at the open `MARK`s.
    marks: Vec<usize>,
    memo: Vec<Option<NodeId>>,
    /// The number of items and bytes copied from one node to another. It is limited to one for each
    /// byte of the pickle, because repeated copies of shared nodes could grow exponentially.
    pub(super) copied: usize,
}

/// The bytes that are charged for a node. They are the bytes of the node and of its position,
/// twice, because an arena that grows holds the old copy and the new one at the same time.
const NODE_COST_BYTES: u64 = 2 * (size_of::<Node<'_>>() + size_of::<u32>()) as u64;
/// The bytes that are charged for a reference to a node, in a list, in a tuple, on the stack or in
/// the memo.
const REFERENCE_COST_BYTES: u64 = size_of::<Option<NodeId>>() as u64;

impl<'a> Machine<'a> {
    /// Interprets opcodes up to `STOP`, and returns the value on top.
    fn run(&mut self) -> Result<NodeId> {
        loop {
            self.op_offset = self.position;
            let [opcode] = self.read_array()?;
            match opcode {
                // PROTO
                0x80 => {
                    let [protocol] = self.read_array()?;
                    if protocol > 5 {
                        return Err(PickleErrorKind::Protocol { protocol });
                    }
                }
                // FRAME: only a hint for buffered reading, but its length must not lie.
                0x95 => {
                    let frame = self.read_unsigned::<8>()?;
                    self.check_remaining(frame)?;
                }
                // STOP
                b'.' => return self.pop(),
                // MARK
                b'(' => self.marks.push(self.stack.len()),
                // POP, which may also take away a mark that nothing lies above.
                b'0' => match self.marks.last() {
                    Some(&mark) if mark == self.stack.len() => {
                        self.marks.pop();
                    }
                    _ => {
                        self.pop()?;
                    }
                },
                // POP_MARK
                b'1' => {
                    self.pop_to_mark()?;
                }
                // DUP
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(top);
                }
                // NONE, NEWTRUE, NEWFALSE
                b'N' => self.stack.push(NONE),
                0x88 => self.stack.push(TRUE),
                0x89 => self.stack.push(FALSE),
                // BININT; BININT1, whose values are nodes that all pickles share; BININT2.
                b'J' => {
                    let value = i32::from_le_bytes(self.read_array()?);
                    self.push(Node::Int(i64::from(value)))?;
                }
                b'K' => {
                    let [small] = self.read_array()?;
                    self.stack.push(small_int(small));
                }
                b'M' => {
                    let short = self.read_unsigned::<2>()?;
                    self.push(Node::Int(short as i64))?;
                }
                // LONG1 and LONG4. The length of the latter is signed; a negative one is beyond the
                // limit.
                0x8a => self.push_integer::<1>()?,
                0x8b => self.push_integer::<4>()?,
                // BINFLOAT, which is big-endian.
                b'G' => {
                    let float = f64::from_be_bytes(self.read_array()?);
                    self.push(Node::Float(float))?;
                }
                // Text: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, and Python 2's SHORT_BINSTRING,
                // BINSTRING.
                0x8c | b'U' => self.push_text::<1>()?,
                b'X' | b'T' => self.push_text::<4>()?,
                0x8d => self.push_text::<8>()?,
                // Bytes: SHORT_BINBYTES, BINBYTES, BINBYTES8.
                b'C' => self.push_bytes::<1>(Node::Bytes)?,
                b'B' => self.push_bytes::<4>(Node::Bytes)?,
                0x8e => self.push_bytes::<8>(Node::Bytes)?,
                // BYTEARRAY8
                0x96 => self.push_bytes::<8>(Node::ByteArray)?,
                // EMPTY_TUPLE; TUPLE, of all above the mark; TUPLE1 to TUPLE3.
                b')' => self.push_tuple(self.stack.len())?,
                b't' => {
                    let start = self.pop_mark()?;
                    self.push_tuple(start)?;
                }
                0x85..=0x87 => {
                    let start = self.height_below(usize::from(opcode - 0x84))?;
                    self.push_tuple(start)?;
                }
                // EMPTY_LIST, APPEND, APPENDS; LIST, of all above the mark.
                b']' => self.push(Node::List(Vec::new()))?,
                b'a' => {
                    let start = self.height_below(1)?;
                    self.extend_list(start)?;
                }
                b'e' => {
                    let start = self.pop_mark()?;
                    self.extend_list(start)?;
                }
                b'l' => {
                    let items = self.pop_to_mark()?;
                    self.push(Node::List(items))?;
                }
                // EMPTY_DICT, SETITEM, SETITEMS; DICT, of the pairs above the mark.
                b'}' => self.push(Node::Dict(Vec::new()))?,
                b's' => {
                    let start = self.height_below(2)?;
                    self.extend_dict(start)?;
                }
                b'u' => {
                    let start = self.pop_mark()?;
                    self.extend_dict(start)?;
                }
                b'd' => {
                    // The dict goes below its keys and values.
                    let start = self.pop_mark()?;
                    self.push(Node::Dict(Vec::new()))?;
                    self.stack[start..].rotate_right(1);
                    self.extend_dict(start + 1)?;
                }
                // EMPTY_SET, ADDITEMS; FROZENSET, of all above the mark.
                0x8f => self.push(Node::Set(Vec::new()))?,
                0x90 => {
                    let items = self.pop_to_mark()?;
                    let expected = "a set";
                    match self.top_node(expected)? {
                        Node::Set(set) => set.extend(items),
                        other => return Err(other.mismatch(expected)),
                    }
                }
                0x91 => {
                    let items = self.pop_to_mark()?;
                    self.push(Node::FrozenSet(items))?;
                }
                // GLOBAL, whose names are lines; STACK_GLOBAL, whose names are on the stack.
                b'c' => {
                    let module = self.read_line()?;
                    let name = self.read_line()?;
                    self.push_global(module, name)?;
                }
                0x93 => {
                    let [module, name] = self.pop_array()?;
                    let (&Node::Str(module), &Node::Str(name)) =
                        (self.node(module), self.node(name))
                    else {
                        return Err(PickleErrorKind::Kind {
                            expected: "a module and a name",
                            found: "other values",
                        });
                    };
                    self.push_global(module, name)?;
                }
                // REDUCE and NEWOBJ
                b'R' | 0x81 => {
                    let [global, args] = self.pop_array()?;
                    self.push_object(global, args)?;
                }
                // NEWOBJ_EX: keyword arguments must be absent, unless the class is not known
                // anyway.
                0x92 => {
                    let [class, args, keywords] = self.pop_array()?;
                    let is_foreign = matches!(self.node(class), Node::Foreign(..));
                    match self.node(keywords) {
                        Node::Dict(entries) if entries.is_empty() || is_foreign => {}
                        other => return Err(other.mismatch("no keyword arguments")),
                    }
                    self.push_object(class, args)?;
                    if is_foreign {
                        self.set_state(keywords)?;
                    }
                }
                // BUILD
                b'b' => {
                    let state = self.pop()?;
                    self.set_state(state)?;
                }
                // BINPERSID
                b'Q' => {
                    let id = self.pop()?;
                    match self.class_of_module(id) {
                        Some(class) => self.stack.push(class),
                        None => self.push(Node::PersistentId(id))?,
                    }
                }
                // BINGET, LONG_BINGET; BINPUT, LONG_BINPUT; MEMOIZE, into the next free entry.
                b'h' => self.push_memo_entry::<1>()?,
                b'j' => self.push_memo_entry::<4>()?,
                b'q' => {
                    let index = self.read_unsigned::<1>()?;
                    self.set_memo_entry(index as usize)?;
                }
                b'r' => {
                    let index = self.read_unsigned::<4>()?;
                    self.set_memo_entry(index as usize)?;
                }
                0x94 => self.set_memo_entry(self.memo.len())?,
                opcode => return Err(PickleErrorKind::Opcode { opcode }),
            }
        }
    }

    /// Reads the next `N` bytes, and moves on.
    fn read_array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let remaining = &self.bytes[self.position..];
        let array = *remaining
            .first_chunk::<N>()
            .ok_or(PickleErrorKind::Truncated)?;
        self.position += N;
        Ok(array)
    }

    /// Reads a little-endian number of `N` bytes without a sign.
    fn read_unsigned<const N: usize>(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&self.read_array::<N>()?);
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns a claimed length, after checking it against the bytes that are left, before anything
    /// is allocated for it.
    fn check_remaining(&self, length: u64) -> Result<usize> {
        let remaining = (self.bytes.len() - self.position) as u64;
        check_limit("length", length, remaining)?;
        Ok(length as usize)
    }

    /// Returns the next bytes of the pickle.
    fn take(&mut self, length: u64) -> Result<&'a [u8]> {
        let length = self.check_remaining(length)?;
        let taken = &self.bytes[self.position..self.position + length];
        self.position += length;
        Ok(taken)
    }

    /// Reads text up to the end of the line.
    fn read_line(&mut self) -> Result<&'a str> {
        let remaining = &self.bytes[self.position..];
        let line_length = remaining
            .iter()
            .position(|&byte| byte == b'\n')
            .ok_or(PickleErrorKind::Truncated)?;
        self.position += line_length + 1;
        std::str::from_utf8(&remaining[..line_length]).map_err(|_| PickleErrorKind::Text)
    }

    /// Reads a text, and pushes it. Its length comes before it, as a number of `N` bytes.
    fn push_text<const N: usize>(&mut self) -> Result<()> {
        let length = self.read_unsigned::<N>()?;
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => self.push(Node::Str(text)),
            Err(_) if has_lone_surrogates(bytes) => {
                // Python's name of a file that is not UTF-8, for example. Rust has no such text, so
                // it is opaque.
                self.push(Node::Bytes(Cow::Borrowed(bytes)))?;
                self.push_tuple(self.stack.len() - 1)?;
                let args = self.pop()?;
                self.push_opaque("builtins", "str (with surrogates)", args)
            }
            Err(_) => Err(PickleErrorKind::Text),
        }
    }

    /// Reads bytes, and pushes them as a node of this kind. Their length comes before them, as a
    /// number of `N` bytes.
    fn push_bytes<const N: usize>(&mut self, kind: fn(Cow<'a, [u8]>) -> Node<'a>) -> Result<()> {
        let length = self.read_unsigned::<N>()?;
        let bytes = self.take(length)?;
        self.push(kind(Cow::Borrowed(bytes)))
    }

    /// Reads an integer, and pushes it. The number of its bytes comes before it, as a number of `N`
    /// bytes.
    fn push_integer<const N: usize>(&mut self) -> Result<()> {
        let length = self.read_unsigned::<N>()?;
        check_limit("integer length", length, MAX_INTEGER_BYTES)?;
        let bytes = self.take(length)?;
        let node = match int_from_le_bytes(bytes) {
            Some(value) => Node::Int(value),
            None => Node::BigInt(bytes),
        };
        self.push(node)
    }

    /// Charges memory for nodes or references to the budget.
    fn charge(&mut self, bytes: u64) -> Result<()> {
        Ok(self.pickle.budget.charge("memory for values", bytes)?)
    }

    /// Charges the memory of so many references to the budget.
    fn charge_references(&mut self, count: usize) -> Result<()> {
        self.charge(count as u64 * REFERENCE_COST_BYTES)
    }

    /// Adds a node to the arena, and pushes it.
    pub(super) fn push(&mut self, node: Node<'a>) -> Result<()> {
        let boxed_bytes = match node {
            Node::Opaque(_) => size_of::<OpaqueNode<'_>>() as u64,
            _ => 0,
        };
        self.charge(NODE_COST_BYTES + boxed_bytes)?;
        let id = own_node(self.pickle.nodes.len());
        self.pickle.nodes.push(node);
        self.pickle.offsets.push(self.op_offset as u32);
        self.stack.push(id);
        Ok(())
    }

    /// Returns the lowest stack height that an opcode may pop to. Values below an open mark must
    /// not be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Returns the value on top.
    fn top(&self) -> Result<NodeId> {
        let above = &self.stack[self.floor()..];
        above.last().copied().ok_or(PickleErrorKind::Stack)
    }

    /// Returns the node of this number.
    pub(super) fn node(&self, id: NodeId) -> &Node<'a> {
        self.pickle.node(id)
    }

    /// Returns the node on top of the stack, for a change. A shared node, which cannot be changed,
    /// is not what was `expected`.
    pub(super) fn top_node(&mut self, expected: &'static str) -> Result<&mut Node<'a>> {
        let top = self.top()?;
        match arena_position(top) {
            Some(position) => Ok(&mut self.pickle.nodes[position]),
            None => Err(self.node(top).mismatch(expected)),
        }
    }

    /// Takes away the value on top, and returns it.
    fn pop(&mut self) -> Result<NodeId> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// Returns the stack height below the `count` values on top.
    fn height_below(&self, count: usize) -> Result<usize> {
        let start = self
            .stack
            .len()
            .checked_sub(count)
            .filter(|&start| start >= self.floor());
        start.ok_or(PickleErrorKind::Stack)
    }

    /// Takes away the `N` values on top, and returns them, the lowest first.
    fn pop_array<const N: usize>(&mut self) -> Result<[NodeId; N]> {
        let start = self.height_below(N)?;
        let values = self.stack[start..]
            .try_into()
            .expect("`start` is N values below the top");
        self.stack.truncate(start);
        Ok(values)
    }

    /// Makes a tuple of the values above a stack height.
    fn push_tuple(&mut self, start: usize) -> Result<()> {
        self.charge_references(self.stack.len() - start)?;
        let values = &self.stack[start..];
        let tuple = TupleNode {
            start: self.pickle.items.len() as u32,
            len: values.len() as u32,
        };
        self.pickle.items.extend_from_slice(values);
        self.stack.truncate(start);
        self.push(Node::Tuple(tuple))
    }

    /// Takes away the last mark, and returns the stack height that it marks.
    fn pop_mark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or(PickleErrorKind::Stack)
    }

    /// Takes away the values above the last mark, and the mark.
    fn pop_to_mark(&mut self) -> Result<Vec<NodeId>> {
        let start = self.pop_mark()?;
        Ok(self.stack.split_off(start))
    }

    /// Returns the position in the arena of the node just below a stack height, to which the values
    /// above that height are to be added. A shared node holds no values, and is an error: it is not
    /// what was `expected`.
    fn find_container(&self, start: usize, expected: &'static str) -> Result<usize> {
        let below = start
            .checked_sub(1)
            .filter(|&below| below >= self.floor())
            .ok_or(PickleErrorKind::Stack)?;
        let id = self.stack[below];
        arena_position(id).ok_or_else(|| self.node(id).mismatch(expected))
    }

    /// Appends the values above a stack height to the list, or to the object of an unknown class,
    /// below them.
    fn extend_list(&mut self, start: usize) -> Result<()> {
        let expected = "a list";
        let container = self.find_container(start, expected)?;
        self.charge_references(self.stack.len() - start)?;
        let added = &self.stack[start..];
        match &mut self.pickle.nodes[container] {
            Node::List(list) => list.extend(added),
            Node::Opaque(object) => object.items.extend(added),
            other => return Err(other.mismatch(expected)),
        }
        self.stack.truncate(start);
        Ok(())
    }

    /// Adds the values above a stack height, keys and values by turns, to the dict, or to the
    /// object of an unknown class, below them.
    fn extend_dict(&mut self, start: usize) -> Result<()> {
        let expected = "a dict";
        let container = self.find_container(start, expected)?;
        self.charge_references(self.stack.len() - start)?;
        let added = &self.stack[start..];
        if !added.len().is_multiple_of(2) {
            return Err(PickleErrorKind::Stack);
        }
        let pairs = added.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        match &mut self.pickle.nodes[container] {
            Node::Dict(dict) => dict.extend(pairs),
            Node::Opaque(object) => object.entries.extend(pairs),
            other => return Err(other.mismatch(expected)),
        }
        self.stack.truncate(start);
        Ok(())
    }

    /// Pushes the value of a memo entry, whose index is a number of `N` bytes.
    fn push_memo_entry<const N: usize>(&mut self) -> Result<()> {
        let index = self.read_unsigned::<N>()?;
        let entry = self.memo.get(index as usize).copied().flatten();
        let id = entry.ok_or(PickleErrorKind::Memo { index })?;
        self.stack.push(id);
        Ok(())
    }

    /// Makes a memo entry of the value on top.
    fn set_memo_entry(&mut self, index: usize) -> Result<()> {
        let top = self.top()?;
        let limit = self.memo.len() + MAX_MEMO_GAP;
        check_limit("memo index", index as u64, limit as u64)?;
        if index >= self.memo.len() {
            self.charge_references(index + 1 - self.memo.len())?;
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(top);
        Ok(())
    }
}

/// Returns `true` if bytes are text as Python pickles it: UTF-8, except for halves of surrogate
/// pairs.
fn has_lone_surrogates(mut bytes: &[u8]) -> bool {
    while let Err(error) = std::str::from_utf8(bytes) {
        let [0xed, 0xa0..=0xbf, 0x80..=0xbf, rest @ ..] = &bytes[error.valid_up_to()..] else {
            return false;
        };
        bytes = rest;
    }
    true
}

/// Returns a little-endian two's-complement integer, if it fits 64 bits.
fn int_from_le_bytes(bytes: &[u8]) -> Option<i64> {
    let is_negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
    let fill = if is_negative { 0xff } else { 0 };
    let mut array = [fill; 8];
    let (low, high) = bytes.split_at(bytes.len().min(8));
    array[..low.len()].copy_from_slice(low);
    let value = i64::from_le_bytes(array);
    (high.iter().all(|&byte| byte == fill) && (value < 0) == is_negative).then_some(value)
}
