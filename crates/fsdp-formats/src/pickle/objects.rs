//! The opcodes that apply a class or function. Nothing is called; the application is only recorded.

use std::borrow::Cow;

use super::error::PickleErrorKind;
use super::global::Global;
use super::node::{Node, NodeId, ObjectNode, OpaqueNode, check_attributes};
use super::read::{Machine, Result};
use crate::limits::check_limit;

impl<'a> Machine<'a> {
    /// Pushes a class or function: a known one, or the module and name of an unknown one.
    pub(super) fn push_global(&mut self, module: &'a str, name: &'a str) -> Result<()> {
        match Global::lookup(module, name) {
            Some(global) => self.push(Node::Global(global)),
            None => self.push(Node::Foreign(module, name)),
        }
    }

    /// Returns the class that a persistent id stands for: before torch 1.6, the class of a module
    /// that was saved whole was saved as `('module', class, file, source)`.
    pub(super) fn class_of_module(&self, id: NodeId) -> Option<NodeId> {
        let Node::Tuple(parts) = *self.node(id) else {
            return None;
        };
        let [kind, class, _file, _source] = *self.pickle.tuple(parts) else {
            return None;
        };
        let is_module = matches!(self.node(kind), Node::Str("module"));
        (is_module && matches!(self.node(class), Node::Foreign(..) | Node::Global(_)))
            .then_some(class)
    }

    /// Pushes a node that records the application `global(*args)`. Calls that build containers and
    /// bytes become plain nodes.
    pub(super) fn push_object(&mut self, global: NodeId, args: NodeId) -> Result<()> {
        let global = match self.node(global) {
            Node::Global(global) => *global,
            Node::Foreign(module, name) => return self.push_opaque(module, name, args),
            Node::Opaque(object) => return self.push_opaque(object.module, object.name, args),
            other => return Err(other.mismatch("a global to apply")),
        };
        let Node::Tuple(values) = *self.node(args) else {
            return Err(self.node(args).mismatch("a tuple of arguments"));
        };
        let first = self.pickle.tuple(values).first().copied();
        let second = self.pickle.tuple(values).get(1).copied();
        let node = match global {
            Global::OrderedDict => Node::Dict(self.copy_dict(first)?),
            // The factory of its values comes first.
            Global::DefaultDict => Node::Dict(self.copy_dict(second)?),
            Global::Set => Node::Set(self.copy_items(first)?),
            Global::FrozenSet => Node::FrozenSet(self.copy_items(first)?),
            Global::CodecsEncode => Node::Bytes(Cow::Owned(self.encode_latin1(first, second)?)),
            // Python before 3.8 spells its bytes as text.
            Global::ByteArray if second.is_some() => {
                Node::ByteArray(Cow::Owned(self.encode_latin1(first, second)?))
            }
            Global::ByteArray => Node::ByteArray(self.copy_bytes(first)?),
            Global::Bytes => Node::Bytes(self.copy_bytes(first)?),
            _ => Node::Object(ObjectNode {
                global,
                args,
                state: None,
            }),
        };
        self.push(node)
    }

    /// Pushes an opaque node for an object of an unknown class, or for the result of an unknown
    /// function.
    pub(super) fn push_opaque(
        &mut self,
        module: &'a str,
        name: &'a str,
        args: NodeId,
    ) -> Result<()> {
        let node = OpaqueNode {
            module,
            name,
            args,
            state: None,
            items: Vec::new(),
            entries: Vec::new(),
        };
        self.push(Node::Opaque(Box::new(node)))
    }

    /// Charges the items or bytes of a node, which are about to be copied.
    fn charge_copy(&mut self, id: NodeId) -> Result<()> {
        let extent = match self.node(id) {
            Node::Tuple(tuple) => tuple.len as usize,
            Node::List(items) | Node::Set(items) | Node::FrozenSet(items) => items.len(),
            Node::Str(text) => text.len(),
            Node::Bytes(bytes) | Node::ByteArray(bytes) => bytes.len(),
            Node::Dict(entries) => entries.len(),
            _ => 0,
        };
        self.copied = self.copied.saturating_add(extent);
        let (value, limit) = (self.copied as u64, self.bytes.len() as u64);
        Ok(check_limit("copies of shared values", value, limit)?)
    }

    /// Returns the entries of the dict of `OrderedDict()`, `OrderedDict([[key, value], …])`,
    /// `defaultdict(factory, {key: value, …})`.
    fn copy_dict(&mut self, pairs: Option<NodeId>) -> Result<Vec<(NodeId, NodeId)>> {
        let Some(id) = pairs else {
            return Ok(Vec::new());
        };
        self.charge_copy(id)?;
        let pairs = match self.node(id) {
            Node::List(pairs) => pairs,
            Node::Dict(entries) => return Ok(entries.clone()),
            other => return Err(other.mismatch("a list of pairs, or a dict")),
        };
        pairs
            .iter()
            .map(|pair| match self.node(*pair) {
                Node::Tuple(pair) if pair.len == 2 => {
                    Ok((self.pickle.tuple(*pair)[0], self.pickle.tuple(*pair)[1]))
                }
                Node::List(pair) if pair.len() == 2 => Ok((pair[0], pair[1])),
                other => Err(other.mismatch("a pair")),
            })
            .collect()
    }

    /// Returns the items of `set([…])`.
    fn copy_items(&mut self, items: Option<NodeId>) -> Result<Vec<NodeId>> {
        let Some(id) = items else {
            return Ok(Vec::new());
        };
        self.charge_copy(id)?;
        match self.node(id) {
            Node::Tuple(tuple) => Ok(self.pickle.tuple(*tuple).to_vec()),
            Node::List(items) | Node::Set(items) | Node::FrozenSet(items) => Ok(items.clone()),
            other => Err(other.mismatch("a list")),
        }
    }

    /// Returns the bytes of `bytearray(b'…')`.
    fn copy_bytes(&mut self, bytes: Option<NodeId>) -> Result<Cow<'a, [u8]>> {
        let Some(id) = bytes else {
            return Ok(Cow::Borrowed(&[]));
        };
        self.charge_copy(id)?;
        match self.node(id) {
            Node::Bytes(bytes) | Node::ByteArray(bytes) => Ok(bytes.clone()),
            other => Err(other.mismatch("bytes")),
        }
    }

    /// Returns the bytes of `_codecs.encode(text, 'latin1')`, and of `bytearray(text, 'latin-1')`.
    fn encode_latin1(&mut self, text: Option<NodeId>, encoding: Option<NodeId>) -> Result<Vec<u8>> {
        let refused = PickleErrorKind::Value {
            what: "bytes must be spelled as latin1 text".into(),
        };
        let (Some(text), Some(encoding)) = (text, encoding) else {
            return Err(refused);
        };
        self.charge_copy(text)?;
        let (Node::Str(text), Node::Str("latin1" | "latin-1")) =
            (self.node(text), self.node(encoding))
        else {
            return Err(refused);
        };
        text.chars()
            .map(|c| u8::try_from(u32::from(c)).map_err(|_| PickleErrorKind::Text))
            .collect()
    }

    /// Sets the state of the object on top.
    pub(super) fn set_state(&mut self, state: NodeId) -> Result<()> {
        let expected = "an object without state";
        match self.top_node(expected)? {
            Node::Object(object) if object.state.is_none() => {
                object.state = Some(state);
                // Checked here, a large state is refused before more is built.
                check_attributes(self.node(state))
            }
            Node::Opaque(object) if object.state.is_none() => {
                object.state = Some(state);
                Ok(())
            }
            // An OrderedDict with Python attributes (a module's state dict has `_metadata`): the
            // attributes are dropped.
            Node::Dict(_) => Ok(()),
            other => Err(other.mismatch(expected)),
        }
    }
}
