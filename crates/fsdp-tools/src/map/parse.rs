//! Reading the text of a map.

use std::collections::BTreeSet;

use super::operation::{HeadCounts, Operation};
use super::rule::{MapError, Rule, Values};
use super::template::Template;

/// Reads the rules of a map.
pub(super) fn rules(text: &str, values: &Values) -> Result<Vec<Rule>, MapError> {
    let mut rules = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let code = line.split_once('#').map_or(line, |(code, _)| code).trim();
        if !code.is_empty() {
            let rule = rule(code, line_number, values);
            rules.push(rule.map_err(|reason| MapError::Line {
                line: line_number,
                reason,
            })?);
        }
    }
    Ok(rules)
}

/// Parses one line: `OLD -> NEW | OPERATION | …`, or `drop OLD`.
fn rule(text: &str, line: usize, values: &Values) -> Result<Rule, String> {
    if let Some(dropped) = text.strip_prefix("drop ") {
        return Ok(Rule {
            line,
            sources: templates(dropped)?,
            targets: Vec::new(),
            operations: Vec::new(),
        });
    }
    let (sources, rest) = text
        .split_once("->")
        .ok_or("a rule is `OLD -> NEW`, or `drop OLD`")?;
    let mut parts = rest.split('|');
    let targets = parts.next().expect("a split text has a first part");
    let rule = Rule {
        line,
        targets: templates(targets)?,
        operations: parts
            .map(|text| operation(text.trim(), values))
            .collect::<Result<_, _>>()?,
        sources: templates(sources)?,
    };
    check(&rule)?;
    Ok(rule)
}

/// Parses templates that are separated by commas.
fn templates(text: &str) -> Result<Vec<Template>, String> {
    text.split(',')
        .map(|key| Template::parse(key.trim()))
        .collect()
}

/// Checks that every name of the new keys gets a text, and that the operations can give so many
/// tensors.
fn check(rule: &Rule) -> Result<(), String> {
    // The names that have a text, and the number of tensors, after each operation.
    let mut known: BTreeSet<&str> = rule.sources[0].names().collect();
    let mut count = rule.sources.len();
    for (at, operation) in rule.operations.iter().enumerate() {
        count = match operation {
            Operation::Concat { .. } | Operation::JoinQkv { .. } => 1,
            Operation::Split { .. } => rule.targets.len(),
            Operation::SplitQkv { .. } => 3,
            Operation::Unstack { name } if at == 0 && rule.sources.len() == 1 => {
                known.insert(name);
                1
            }
            Operation::Unstack { .. } => {
                return Err("`unstack` comes first, and takes one tensor".to_owned());
            }
            Operation::Stack { name }
                if at + 1 == rule.operations.len() && rule.targets.len() == 1 =>
            {
                if !known.remove(name.as_str()) {
                    return Err(format!("no old key has `{{{name}}}`"));
                }
                count
            }
            Operation::Stack { .. } => {
                return Err("`stack` comes last, and gives one tensor".to_owned());
            }
            _ => count,
        };
    }
    if count != rule.targets.len() {
        return Err(format!(
            "{count} tensors cannot get {} new keys",
            rule.targets.len()
        ));
    }
    // The further old keys have the same names as the first one, or the name that counts the stack.
    let stacked = match rule.operations.last() {
        Some(Operation::Stack { name }) => Some(name.as_str()),
        _ => None,
    };
    let of_targets = rule.targets.iter().flat_map(Template::names);
    let of_sources = rule.sources[1..]
        .iter()
        .flat_map(Template::names)
        .filter(|name| Some(*name) != stacked);
    match of_targets
        .chain(of_sources)
        .find(|name| !known.contains(name))
    {
        Some(name) => Err(format!("the first old key has no `{{{name}}}`")),
        None => Ok(()),
    }
}

/// Parses an operation, such as `split(0, 2, 1)`. Its arguments are numbers, or names that have
/// values.
fn operation(text: &str, values: &Values) -> Result<Operation, String> {
    // An operation without arguments has no brackets.
    let (name, arguments) = match text.split_once('(') {
        Some((name, rest)) => {
            let inside = rest
                .strip_suffix(')')
                .ok_or_else(|| format!("`{text}` has no `)`"))?;
            (name.trim(), inside.split(',').map(str::trim).collect())
        }
        None => (text, Vec::new()),
    };
    Ok(match (name, &arguments[..]) {
        ("transpose", []) => Operation::Transpose,
        ("concat", [dim]) => Operation::Concat {
            dim: number(dim, values)?,
        },
        ("split", [dim, shares @ ..]) => {
            let shares = shares
                .iter()
                .map(|share| number(share, values))
                .collect::<Result<_, _>>()?;
            Operation::Split {
                dim: number(dim, values)?,
                shares,
            }
        }
        ("permute" | "unpermute", [heads]) => Operation::Permute {
            heads: number(heads, values)?,
            is_back: name == "unpermute",
        },
        ("split_qkv", [heads, kv_heads]) => {
            Operation::SplitQkv(head_counts(heads, kv_heads, values)?)
        }
        ("join_qkv", [heads, kv_heads]) => {
            Operation::JoinQkv(head_counts(heads, kv_heads, values)?)
        }
        ("unstack", [name]) => Operation::Unstack {
            name: (*name).to_owned(),
        },
        ("stack", [name]) => Operation::Stack {
            name: (*name).to_owned(),
        },
        _ => return Err(format!("`{text}` is no operation")),
    })
}

/// The largest number in a map: sizes are computed from several of them.
const MAX_NUMBER: usize = 1 << 24;

/// Parses an argument that is a number, or a name that has a value.
fn number(text: &str, values: &Values) -> Result<usize, String> {
    let number = text
        .parse()
        .ok()
        .or_else(|| values.get(text).copied())
        .ok_or_else(|| format!("`{text}` has no value: give it with `--set {text}=N`"))?;
    if number > MAX_NUMBER {
        return Err(format!("{number} is too large"));
    }
    Ok(number)
}

/// Parses two arguments that are numbers of heads.
fn head_counts(heads: &str, kv_heads: &str, values: &Values) -> Result<HeadCounts, String> {
    Ok(HeadCounts {
        queries: number(heads, values)?,
        keys: number(kv_heads, values)?,
    })
}
