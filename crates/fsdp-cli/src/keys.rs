//! The keys that are converted or compared, and their new names.

use anyhow::{Result, bail, ensure};
use clap::Args;
use fsdp_formats::metadata::Metadata;
use fsdp_layout::path::has_empty_part;
use fsdp_tools::convert::Rename;
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::failure::{no_such_keys_error, nothing_selected_error, usage_error};
use crate::output;
use crate::text::escaped;

/// The options that select keys.
#[derive(Debug, Args)]
pub(crate) struct KeyFilter {
    /// Only keys that this glob matches; may be given more than once
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// No keys that this glob matches; may be given more than once
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
}

impl KeyFilter {
    /// Returns the selected keys, which rules and a prefix rename.
    ///
    /// # Errors
    /// A glob that is none.
    pub(crate) fn keys<'a>(
        &'a self,
        rules: &'a [(String, String)],
        prefix: Option<&'a str>,
    ) -> Result<Keys<'a>> {
        Keys::new(&self.include, &self.exclude, rules, prefix)
    }
}

/// `--include`, `--exclude`, `--rename` and `--prefix`.
pub(crate) struct Keys<'a> {
    include: Globs<'a>,
    exclude: Globs<'a>,
    rules: &'a [(String, String)],
    prefix: Option<&'a str>,
}

impl<'a> Keys<'a> {
    /// Compiles the globs of the options.
    ///
    /// # Errors
    /// A glob that is none.
    pub(crate) fn new(
        include: &'a [String],
        exclude: &'a [String],
        rules: &'a [(String, String)],
        prefix: Option<&'a str>,
    ) -> Result<Self> {
        Ok(Keys {
            include: Globs::new(include)?,
            exclude: Globs::new(exclude)?,
            rules,
            prefix,
        })
    }

    /// Returns `true` if some keys may be left out.
    pub(crate) fn has_globs(&self) -> bool {
        !self.include.globs.is_empty() || !self.exclude.globs.is_empty()
    }

    /// Returns `true` if `--include` selects a key.
    pub(crate) fn includes(&self, key: &str) -> bool {
        self.include.globs.is_empty() || self.include.set.is_match(key)
    }

    fn selects(&self, key: &str) -> bool {
        // `--exclude` beats `--include`: whoever gives both wants a part of a part.
        self.includes(key) && !self.exclude.set.is_match(key)
    }

    /// Returns what becomes of a key: it is dropped if it is not selected. The first rule that fits
    /// renames it, and then the prefix is put before it.
    pub(crate) fn rename(&self, key: &str) -> Rename {
        if !self.selects(key) {
            return Rename::Drop;
        }
        // Only the first rule counts, so a special rule can stand before a general one.
        let renamed = self.rules.iter().find_map(|rule| apply_rename(rule, key));
        match (renamed, self.prefix) {
            (None, None) => Rename::Keep,
            (Some(name), None) => Rename::To(name),
            (name, Some(prefix)) => {
                Rename::To(format!("{prefix}{}", name.as_deref().unwrap_or(key)))
            }
        }
    }

    /// Checks that each glob of `--include` matches one of these keys. A glob of `--exclude` that
    /// matches none may be one that is given for many checkpoints, and is only told.
    ///
    /// # Errors
    /// A glob of `--include` that matches no key, which is probably a mistake.
    pub(crate) fn check_globs<'k>(
        &self,
        keys: impl Iterator<Item = &'k str> + Clone,
    ) -> Result<()> {
        // Only the first is told: the others are likely to have the same slip.
        if let Some(glob) = self.include.list_unused(keys.clone()).first() {
            bail!(no_such_keys_error(format!(
                "`--include {glob}` matches no key"
            )));
        }
        for glob in self.exclude.list_unused(keys) {
            output::print_message(&format!("`--exclude {}` matches no key", escaped(glob)));
        }
        Ok(())
    }

    /// Checks that the new name of a key may be meant.
    ///
    /// # Errors
    /// The new key is empty or has an empty part, or a rule or the prefix makes one word of two:
    /// a dot is missing, or there is one too many.
    fn check_new_key(&self, key: &str) -> Result<()> {
        let Rename::To(new_key) = self.rename(key) else {
            return Ok(());
        };
        let (shown_key, shown_new_key) = (escaped(key), escaped(&new_key));
        ensure!(
            !new_key.is_empty(),
            no_such_keys_error("`--rename` would make a key empty")
        );
        let rule = self
            .rules
            .iter()
            .find(|rule| apply_rename(rule, key).is_some());
        if let Some((old, new)) = rule {
            let suffix = &key[old.len()..];
            let is_joined = old.ends_with('.') && makes_one_word(new, suffix);
            // A key that has an empty part in the source may keep it.
            let is_empty_part = has_empty_part(&format!("{new}{suffix}")) && !has_empty_part(key);
            if is_joined || is_empty_part {
                bail!(usage_error(
                    format!(
                        "`--rename {old}={new}` would make `{shown_new_key}` of `{shown_key}`: a dot is \
                         missing or one too many"
                    ),
                    "give both OLD and NEW a dot at the end, or neither; `model.=` removes `model.`",
                ));
            }
        }
        let Some(prefix) = self.prefix else {
            return Ok(());
        };
        let name = &new_key[prefix.len()..];
        if makes_one_word(prefix, name) || has_empty_part(&new_key) && !has_empty_part(name) {
            bail!(usage_error(
                format!("`--prefix {prefix}` would make `{shown_new_key}` of `{shown_key}`"),
                "a prefix ends with one dot and begins with none, as `--prefix model.` does",
            ));
        }
        Ok(())
    }

    /// Checks that the options fit the keys of a checkpoint.
    ///
    /// # Errors
    /// Nothing is selected, a rule fits nothing (both are likely slips), or a key would become one
    /// that cannot be meant.
    pub(crate) fn check(&self, metadata: &Metadata) -> Result<()> {
        let keys = metadata.entries.keys().map(String::as_str);
        let selected: Vec<&str> = keys.clone().filter(|key| self.selects(key)).collect();
        if selected.is_empty() && !metadata.entries.is_empty() {
            bail!(nothing_selected_error());
        }
        // The globs are checked against all keys, and not against those that other globs leave.
        self.check_globs(keys)?;
        for rule in self.rules {
            if !selected.iter().any(|key| apply_rename(rule, key).is_some()) {
                let (old, new) = rule;
                bail!(no_such_keys_error(format!(
                    "`--rename {old}={new}` matches no key"
                )));
            }
        }
        selected.iter().try_for_each(|key| self.check_new_key(key))
    }
}

/// Returns `true` if two texts, put together, make one word of two.
fn makes_one_word(start: &str, end: &str) -> bool {
    start.ends_with(char::is_alphanumeric) && end.starts_with(char::is_alphanumeric)
}

/// Globs, each of which selects keys.
struct Globs<'a> {
    globs: &'a [String],
    set: GlobSet,
}

impl<'a> Globs<'a> {
    /// Compiles globs.
    ///
    /// # Errors
    /// A glob that is none.
    fn new(globs: &'a [String]) -> Result<Self> {
        let mut set = GlobSetBuilder::new();
        for glob in globs {
            let compiled = Glob::new(glob);
            set.add(compiled.map_err(|error| {
                usage_error(
                    format!("`{glob}` is not a valid glob: {}", error.kind()),
                    "a glob may contain `*`, `?`, `[a-z]` and `{a,b}`; quote it for the shell",
                )
            })?);
        }
        Ok(Globs {
            globs,
            set: set.build()?,
        })
    }

    /// Lists the globs that match none of `keys`.
    fn list_unused<'k>(&self, keys: impl Iterator<Item = &'k str>) -> Vec<&'a str> {
        let mut is_used = vec![false; self.globs.len()];
        for key in keys {
            // One pass over the keys finds all unused globs, however many there are.
            for index in self.set.matches(key) {
                is_used[index] = true;
            }
        }
        let mut unused = Vec::new();
        for (glob, is_used) in self.globs.iter().zip(is_used) {
            if !is_used {
                unused.push(glob.as_str());
            }
        }
        unused
    }
}

/// The number of near keys that a message lists.
const MAX_NEAREST: usize = 3;

/// The most keys that are compared.
const MAX_COMPARED_KEYS: usize = 20_000;

/// The longest key that is compared letter by letter.
const MAX_COMPARED_BYTES: usize = 256;

/// The similarity from which a key may be the one that was meant. It is the one that clap uses for
/// names of options.
const MIN_SIMILARITY: f64 = 0.7;

/// Returns a list of the keys that are most like one that a checkpoint lacks, the likest first;
/// `None` if no key is like it.
pub(crate) fn nearest_keys_text(key: &str, metadata: &Metadata) -> Option<String> {
    let mut candidates = Vec::new();
    // A checkpoint may have millions of keys, and this only helps with a slip.
    for candidate in metadata.entries.keys().take(MAX_COMPARED_KEYS) {
        let similarity = similarity_between(key, candidate);
        if similarity > MIN_SIMILARITY {
            candidates.push((similarity, candidate));
        }
    }
    if candidates.is_empty() {
        return None;
    }
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    let nearest = candidates.iter().take(MAX_NEAREST);
    let quoted: Vec<String> = nearest
        .map(|(_, key)| format!("`{}`", escaped(key)))
        .collect();
    Some(quoted.join(", "))
}

/// Returns how alike two keys are: from 0 to 1, and 1 also where one ends or begins with the other.
fn similarity_between(a: &str, b: &str) -> f64 {
    if is_end_of(a, b) || is_end_of(b, a) {
        return 1.0;
    }
    if a.len().max(b.len()) > MAX_COMPARED_BYTES {
        return 0.0;
    }
    strsim::jaro_winkler(a, b)
}

/// Returns `true` if a key ends or begins with a part that is not empty.
fn is_end_of(part: &str, whole: &str) -> bool {
    !part.is_empty() && (whole.ends_with(part) || whole.starts_with(part))
}

/// Returns the new key; `None` if the rule does not fit.
fn apply_rename((old, new): &(String, String), key: &str) -> Option<String> {
    let suffix = key.strip_prefix(old.as_str())?;
    // `model` must not rename `models`: a rule fits a key only at the end of a part.
    let is_whole_part = suffix.is_empty() || suffix.starts_with('.') || old.ends_with('.');
    is_whole_part.then(|| format!("{new}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(old: &str, new: &str) -> (String, String) {
        (old.to_owned(), new.to_owned())
    }

    #[test]
    fn rules_fit_whole_parts_of_keys() {
        assert_eq!(
            apply_rename(&rule("model", "m"), "model.h.0"),
            Some("m.h.0".to_owned())
        );
        assert_eq!(
            apply_rename(&rule("model", "m"), "model"),
            Some("m".to_owned())
        );
        assert_eq!(
            apply_rename(&rule("model.", ""), "model.h.0"),
            Some("h.0".to_owned())
        );
        assert_eq!(apply_rename(&rule("model", "m"), "models.h.0"), None);
    }

    #[test]
    fn the_nearest_keys_are_the_most_like() {
        let mut metadata = Metadata::default();
        for key in [
            "model.up.weight",
            "model.down.weight",
            "model.up.bias",
            "step",
        ] {
            metadata.entries.insert(
                key.to_owned(),
                fsdp_formats::metadata::Entry::Bytes(Default::default()),
            );
        }
        let near = nearest_keys_text("model.up.wieght", &metadata).unwrap();
        assert!(near.starts_with("`model.up.weight`, "), "{near}");
        assert_eq!(
            nearest_keys_text("weight", &metadata).unwrap(),
            "`model.down.weight`, `model.up.weight`"
        );
        assert_eq!(nearest_keys_text("optimizer.lr", &metadata), None);
        assert_eq!(nearest_keys_text("", &metadata), None);
    }

    #[test]
    fn the_first_rule_counts_and_the_prefix_comes_last() {
        let rules = [rule("a", "x"), rule("a.b", "y")];
        let (include, exclude) = (["a.*".to_owned(), "c".to_owned()], ["*.secret".to_owned()]);
        let keys = Keys::new(&include, &exclude, &rules, Some("p.")).unwrap();
        assert_eq!(keys.rename("a.b"), Rename::To("p.x.b".into()));
        assert_eq!(keys.rename("c"), Rename::To("p.c".into()));
        assert_eq!(keys.rename("a.secret"), Rename::Drop);
        assert_eq!(keys.rename("d"), Rename::Drop);
        assert!(Keys::new(&["[".into()], &[], &[], None).is_err());
    }
}
