//! Key templates with placeholders: `layers.{i}.weight`.

use std::collections::BTreeMap;

/// The texts that stand for the names in a template.
pub(super) type Bindings = BTreeMap<String, String>;

/// A key with placeholders.
#[derive(Debug, Clone)]
pub(super) struct Template(Vec<TemplatePart>);

/// A part of a template.
#[derive(Debug, Clone)]
enum TemplatePart {
    /// This text itself.
    Text(String),
    /// A placeholder of this name.
    Placeholder {
        name: String,
        /// `true` if it stands for any text, `false` for a text without dots.
        is_any_text: bool,
    },
}

impl Template {
    /// Parses a template.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut remaining = text;
        while let Some(start) = remaining.find('{') {
            if start > 0 {
                parts.push(TemplatePart::Text(remaining[..start].to_owned()));
            }
            let length = remaining[start..]
                .find('}')
                .ok_or_else(|| format!("`{text}` has no end of `{{`"))?;
            // `{name*}` stands for any text.
            let placeholder = &remaining[start + 1..start + length];
            let name = placeholder.strip_suffix('*').unwrap_or(placeholder);
            if name.is_empty()
                || !name
                    .chars()
                    .all(|character| character.is_ascii_alphanumeric() || character == '_')
            {
                return Err(format!("`{name}` is no name"));
            }
            // It could not be told where the text of the first one ends.
            if let Some(TemplatePart::Placeholder { .. }) = parts.last() {
                return Err(format!("`{text}` has two placeholders side by side"));
            }
            parts.push(TemplatePart::Placeholder {
                name: name.to_owned(),
                is_any_text: name.len() < placeholder.len(),
            });
            remaining = &remaining[start + length + 1..];
        }
        if remaining.contains('}') {
            return Err(format!("`{text}` has no start of `}}`"));
        }
        if !remaining.is_empty() {
            parts.push(TemplatePart::Text(remaining.to_owned()));
        }
        if parts.is_empty() {
            return Err("a key is empty".to_owned());
        }
        Ok(Template(parts))
    }

    /// Returns the names of the placeholders.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            TemplatePart::Placeholder { name, .. } => Some(name.as_str()),
            TemplatePart::Text(_) => None,
        })
    }

    /// Makes each placeholder stand for any text whose name does so in `other`, so that both fit
    /// the same keys.
    pub(super) fn fit_texts_of(&mut self, other: &Template) {
        for part in &mut self.0 {
            let TemplatePart::Placeholder { name, is_any_text } = part else {
                continue;
            };
            *is_any_text |= other.0.iter().any(|part| {
                matches!(part, TemplatePart::Placeholder { name: other_name, is_any_text: true }
                    if other_name == name)
            });
        }
    }

    /// Returns the texts that stand for the names if the template is this key, and `None` if it
    /// cannot be. A name that occurs twice must be the same text twice.
    pub(super) fn matches(&self, key: &str) -> Option<Bindings> {
        let mut bindings = Bindings::new();
        let mut remaining = key;
        for (index, part) in self.0.iter().enumerate() {
            let (name, is_any_text) = match part {
                TemplatePart::Text(text) => {
                    remaining = remaining.strip_prefix(text.as_str())?;
                    continue;
                }
                TemplatePart::Placeholder { name, is_any_text } => (name, *is_any_text),
            };
            // A placeholder goes up to the text after it; if it stands for any text, up to the last
            // place where that occurs.
            let end = match self.0.get(index + 1) {
                Some(TemplatePart::Text(next)) if is_any_text => remaining.rfind(next.as_str())?,
                Some(TemplatePart::Text(next)) => remaining.find(next.as_str())?,
                _ => remaining.len(),
            };
            let text = &remaining[..end];
            if text.is_empty() || (!is_any_text && text.contains('.')) {
                return None;
            }
            let earlier_text = bindings.insert(name.clone(), text.to_owned());
            if earlier_text.is_some_and(|earlier_text| earlier_text != text) {
                return None;
            }
            remaining = &remaining[end..];
        }
        remaining.is_empty().then_some(bindings)
    }

    /// Returns the key with these texts; `None` if one is missing.
    pub(super) fn fill(&self, bindings: &Bindings) -> Option<String> {
        let mut key = String::new();
        for part in &self.0 {
            match part {
                TemplatePart::Text(text) => key.push_str(text),
                TemplatePart::Placeholder { name, .. } => key.push_str(bindings.get(name)?),
            }
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_match_parts_of_keys() {
        let template = Template::parse("layers.{i}.attention.{w}.weight").unwrap();
        let bindings = template.matches("layers.12.attention.wq.weight").unwrap();
        assert_eq!(
            (bindings["i"].as_str(), bindings["w"].as_str()),
            ("12", "wq")
        );
        assert_eq!(
            template.fill(&bindings).unwrap(),
            "layers.12.attention.wq.weight"
        );
        for other in [
            "layers.12.attention.weight",
            "layers.1.2.attention.w.weight",
            "x.layers.1.attention.w.weight",
        ] {
            assert_eq!(template.matches(other), None, "{other}");
        }
        let rest = Template::parse("model.{rest*}.weight").unwrap();
        assert_eq!(
            rest.matches("model.a.weight.b.weight").unwrap()["rest"],
            "a.weight.b"
        );
        let twice = Template::parse("{a}.{a}").unwrap();
        assert!(twice.matches("x.x").is_some() && twice.matches("x.y").is_none());
        for bad in ["", "a.{", "a.}", "a.{}", "{a}{b}", "{a b}"] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
    }
}
