//! Finds the rule that matches each key, and computes the new keys.

use std::collections::HashSet;

use fsdp_formats::metadata::Metadata;
use fsdp_layout::path::has_empty_part;
use indexmap::IndexMap;

use super::node::Node;
use super::operation::Operation;
use super::rule::{KeyRule, Map, MapError, StrictKeys};
use super::template::{Bindings, Template};

/// The new keys of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct NewKeys {
    /// The new tensors.
    pub(super) tensors: IndexMap<String, Node>,
    /// The new keys of what keeps its content, with the old ones.
    pub(super) renamed: IndexMap<String, String>,
    /// The keys that no rule fits, and that stay as they are.
    pub(super) unmatched: Vec<String>,
}

/// Applies a map to the keys of a checkpoint, and returns the new keys.
pub(super) fn match_keys(map: &Map, metadata: &Metadata) -> Result<NewKeys, MapError> {
    let mut matcher = Matcher {
        metadata,
        taken: HashSet::new(),
        new_keys: NewKeys::default(),
    };
    let mut is_map_used = false;
    for rule in &map.rules {
        let is_used = matcher.apply_rule(rule)?;
        // A map that is built in has rules for several variants of a model.
        if !is_used && !map.is_builtin {
            return Err(MapError::Unused { line: rule.line });
        }
        is_map_used |= is_used;
    }
    if !is_map_used {
        return Err(MapError::UnusedMap);
    }
    // All keys that no rule has taken stay as they are.
    for fqn in metadata.entries.keys() {
        if !matcher.taken.contains(fqn) {
            matcher.rename(fqn, fqn.clone())?;
            matcher.new_keys.unmatched.push(fqn.clone());
        }
    }
    check_strict(map, metadata, &matcher.new_keys)?;
    Ok(matcher.new_keys)
}

/// The most keys that a message lists.
const MAX_LISTED: usize = 5;

/// Refuses tensors that no rule has named, though the map says that one must.
fn check_strict(map: &Map, metadata: &Metadata, new_keys: &NewKeys) -> Result<(), MapError> {
    let mut unnamed = Vec::new();
    for fqn in &new_keys.unmatched {
        let is_strict = |keys: &StrictKeys| keys.source.matches(fqn).is_some();
        // What is no tensor, such as the `_extra_state` of Megatron, no model loads.
        if metadata.tensor(fqn).is_some() && map.strict.iter().any(is_strict) {
            unnamed.push(format!("`{fqn}`"));
        }
    }
    if unnamed.is_empty() {
        return Ok(());
    }
    let count = unnamed.len();
    unnamed.truncate(MAX_LISTED);
    if count > MAX_LISTED {
        unnamed.push("…".to_owned());
    }
    Err(MapError::Unnamed {
        count,
        keys: unnamed.join(", "),
    })
}

/// The state of applying the rules of a map to the keys of a checkpoint, one after the other.
struct Matcher<'m> {
    metadata: &'m Metadata,
    /// The old keys that a rule has taken.
    taken: HashSet<String>,
    new_keys: NewKeys,
}

/// Returns the error that a rule fits a key, but not its tensors.
fn mismatch(rule: &KeyRule, fqn: &str, reason: impl Into<String>) -> MapError {
    MapError::Tensor {
        line: rule.line,
        fqn: fqn.to_owned(),
        reason: reason.into(),
    }
}

impl Matcher<'_> {
    /// Applies a rule to all keys that it fits. Returns `false` if it fits none.
    fn apply_rule(&mut self, rule: &KeyRule) -> Result<bool, MapError> {
        if rule.targets.is_empty() {
            return Ok(self.drop_keys(rule));
        }
        // Step 1: find the keys that the first old key of the rule fits. Its texts tell the other
        // old keys, and the new ones.
        let mut matches = Vec::new();
        for fqn in self.metadata.entries.keys() {
            if !self.taken.contains(fqn)
                && let Some(bindings) = rule.sources[0].matches(fqn)
            {
                matches.push((fqn.clone(), bindings));
            }
        }
        if let Some(Operation::Stack { name }) = rule.operations.last() {
            return self.apply_stack(rule, name, matches);
        }
        // Step 2: apply the rule to each, together with the keys that belong to it.
        let mut is_used = false;
        for (fqn, bindings) in matches {
            is_used |= self.apply_to_key(rule, &fqn, &bindings)?;
        }
        Ok(is_used)
    }

    /// Takes the keys of a rule that drops them. Returns `false` if it fits none.
    fn drop_keys(&mut self, rule: &KeyRule) -> bool {
        let mut is_used = false;
        for fqn in self.metadata.entries.keys() {
            if rule
                .sources
                .iter()
                .any(|source| source.matches(fqn).is_some())
            {
                self.taken.insert(fqn.clone());
                is_used = true;
            }
        }
        is_used
    }

    /// Applies a rule to one key, and to the others that belong to it. Returns `false` if one of
    /// them is not there, or taken.
    fn apply_to_key(
        &mut self,
        rule: &KeyRule,
        fqn: &str,
        bindings: &Bindings,
    ) -> Result<bool, MapError> {
        let Some(sources) = self.find_sources(rule, bindings) else {
            return Ok(false);
        };
        // Without operations, values move too.
        let Some(first_operation) = rule.operations.first() else {
            for (source, target) in sources.iter().zip(&rule.targets) {
                let new_key = fill_new_key(rule, fqn, target, bindings)?;
                if rule.is_copy {
                    self.add(source, new_key)?;
                } else {
                    self.rename(source, new_key)?;
                }
            }
            return Ok(true);
        };
        let nodes = self.source_nodes(rule, &sources)?;
        let Operation::Unstack { name } = first_operation else {
            self.add_tensors(rule, fqn, bindings, nodes)?;
            return Ok(true);
        };
        // A rule that unstacks takes one tensor. Each index of its first dimension becomes the name
        // in the new keys.
        for node in nodes {
            let unstacked = node
                .unstack()
                .map_err(|reason| mismatch(rule, fqn, reason))?;
            for (index, node) in unstacked.into_iter().enumerate() {
                let mut bindings = bindings.clone();
                bindings.insert(name.clone(), index.to_string());
                self.add_tensors(rule, fqn, &bindings, vec![node])?;
            }
        }
        Ok(true)
    }

    /// Applies a rule that stacks: the keys that differ in one name only are one tensor. Returns
    /// `false` if there are no keys.
    fn apply_stack(
        &mut self,
        rule: &KeyRule,
        name: &str,
        matches: Vec<(String, Bindings)>,
    ) -> Result<bool, MapError> {
        // The layers of each stack with their numbers, by the new key.
        let mut stacks: IndexMap<String, Vec<(usize, String, Bindings)>> = IndexMap::new();
        for (fqn, bindings) in matches {
            let number = bindings
                .get(name)
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| mismatch(rule, &fqn, "its place in the stack is no number"))?;
            let target = fill_new_key(rule, &fqn, &rule.targets[0], &bindings)?;
            stacks
                .entry(target)
                .or_default()
                .push((number, fqn, bindings));
        }
        let is_used = !stacks.is_empty();
        for (target, mut layers) in stacks {
            // The layers must be numbered from 0 without gaps: a missing one would shift the
            // others.
            layers.sort_unstable_by_key(|(number, ..)| *number);
            let mut nodes = Vec::new();
            for (place, (number, fqn, bindings)) in layers.into_iter().enumerate() {
                if number != place {
                    let reason = format!("number {place} of the stack is missing");
                    return Err(mismatch(rule, &fqn, reason));
                }
                let sources = self
                    .find_sources(rule, &bindings)
                    .ok_or_else(|| mismatch(rule, &fqn, "its other tensors are missing"))?;
                nodes.extend(apply_operations(
                    rule,
                    &fqn,
                    self.source_nodes(rule, &sources)?,
                )?);
                self.taken.extend(sources);
            }
            let node = Node::stack(nodes).map_err(|reason| mismatch(rule, &target, reason))?;
            self.insert(target, node)?;
        }
        Ok(is_used)
    }

    /// Returns the old keys of a rule for these bindings; `None` if one is not there, or taken.
    fn find_sources(&self, rule: &KeyRule, bindings: &Bindings) -> Option<Vec<String>> {
        let mut sources = Vec::new();
        for source in &rule.sources {
            let fqn = source.fill(bindings)?;
            if !self.metadata.entries.contains_key(&fqn) || self.taken.contains(&fqn) {
                return None;
            }
            sources.push(fqn);
        }
        Some(sources)
    }

    /// Returns the tensors that a rule takes. A key of a value is an error.
    fn source_nodes(&self, rule: &KeyRule, sources: &[String]) -> Result<Vec<Node>, MapError> {
        let mut nodes = Vec::new();
        for fqn in sources {
            let tensor = self
                .metadata
                .tensor(fqn)
                .ok_or_else(|| mismatch(rule, fqn, "it is a value, and no tensor"))?;
            nodes.push(Node::from_source(fqn, tensor));
        }
        Ok(nodes)
    }

    /// Adds what the operations make of tensors, under the new keys of a rule.
    fn add_tensors(
        &mut self,
        rule: &KeyRule,
        fqn: &str,
        bindings: &Bindings,
        nodes: Vec<Node>,
    ) -> Result<(), MapError> {
        let sources: Vec<String> = nodes
            .iter()
            .flat_map(Node::sources)
            .map(str::to_owned)
            .collect();
        // Nothing is taken before the operations have succeeded.
        let new_nodes = apply_operations(rule, fqn, nodes)?;
        self.taken.extend(sources);
        for (target, node) in rule.targets.iter().zip(new_nodes) {
            self.insert(fill_new_key(rule, fqn, target, bindings)?, node)?;
        }
        Ok(())
    }

    /// Adds a tensor. Two rules must not give the same key.
    fn insert(&mut self, fqn: String, node: Node) -> Result<(), MapError> {
        self.check_free(&fqn)?;
        self.new_keys.tensors.insert(fqn, node);
        Ok(())
    }

    /// Gives a tensor or value another key.
    fn rename(&mut self, source: &str, target: String) -> Result<(), MapError> {
        self.taken.insert(source.to_owned());
        self.add(source, target)
    }

    /// Adds a key for a tensor or value of the source.
    fn add(&mut self, source: &str, target: String) -> Result<(), MapError> {
        self.check_free(&target)?;
        self.new_keys.renamed.insert(target, source.to_owned());
        Ok(())
    }

    /// Refuses a key that the new checkpoint has already: from another rule, from the same rule for
    /// another key, or kept.
    fn check_free(&self, fqn: &str) -> Result<(), MapError> {
        if self.new_keys.tensors.contains_key(fqn) || self.new_keys.renamed.contains_key(fqn) {
            return Err(MapError::Twice {
                fqn: fqn.to_owned(),
            });
        }
        Ok(())
    }
}

/// Fills the template of a new key of a rule. `fqn` is the old key, for messages.
///
/// # Errors
/// A name of the template has no binding, or the new key has an empty part.
fn fill_new_key(
    rule: &KeyRule,
    fqn: &str,
    target: &Template,
    bindings: &Bindings,
) -> Result<String, MapError> {
    let new_key = target
        .fill(bindings)
        .ok_or_else(|| mismatch(rule, fqn, "a new key lacks a name"))?;
    // A key that has an empty part in the source may keep it.
    if has_empty_part(&new_key) && !has_empty_part(fqn) {
        let reason = format!("its new key `{new_key}` has a dot too many");
        return Err(mismatch(rule, fqn, reason));
    }
    Ok(new_key)
}

/// Applies the operations of a rule to tensors, and returns what they make of them. Operations that
/// change keys leave the tensors as they are.
fn apply_operations(
    rule: &KeyRule,
    fqn: &str,
    mut nodes: Vec<Node>,
) -> Result<Vec<Node>, MapError> {
    for operation in &rule.operations {
        nodes = operation
            .apply(nodes, rule.targets.len())
            .map_err(|reason| mismatch(rule, fqn, reason))?;
    }
    Ok(nodes)
}
