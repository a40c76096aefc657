//! What a stack of resources is, for people.

#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

/// A resource by its name and settings, with those that it stands on. Displayed it is a tree:
///
/// ```
/// use vpmm::resource::Description;
///
/// let large = Description::new("device-malloc").with("device", 0);
/// let small = Description::new("pool").with("initial", "1 GiB").over(large.clone());
/// let both = Description::new("binning").over(small).over(large);
/// assert_eq!(
///     Description::new("logging").over(both).to_string(),
///     "logging
/// └─ binning
///    ├─ pool(initial=1 GiB)
///    │  └─ device-malloc(device=0)
///    └─ device-malloc(device=0)"
/// );
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Description {
    name: Cow<'static, str>,
    settings: Vec<(&'static str, String)>,
    children: Vec<Self>,
}

impl Description {
    /// A resource of this name, without settings, that stands on nothing.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self { name: name.into(), settings: Vec::new(), children: Vec::new() }
    }

    /// The same with one setting more.
    #[must_use]
    pub fn with(mut self, setting: &'static str, value: impl fmt::Display) -> Self {
        self.settings.push((setting, value.to_string()));
        self
    }

    /// The same, standing on one resource more.
    #[must_use]
    pub fn over(mut self, upstream: Self) -> Self {
        self.children.push(upstream);
        self
    }

    /// The same without what it stands on: for one of several that stand on the same.
    pub(crate) fn alone(mut self) -> Self {
        self.children.clear();
        self
    }

    /// The resource's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its settings and their values, in order.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.settings.iter().map(|(name, value)| (*name, value.as_str()))
    }

    /// What it stands on, in order.
    pub fn children(&self) -> &[Self] {
        &self.children
    }

    fn draw(&self, f: &mut fmt::Formatter<'_>, indent: &mut String) -> fmt::Result {
        f.write_str(&self.name)?;
        for (index, (name, value)) in self.settings.iter().enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { '(' } else { ' ' })?;
        }
        if !self.settings.is_empty() {
            f.write_str(")")?;
        }
        for (index, child) in self.children.iter().enumerate() {
            let is_last = index + 1 == self.children.len();
            let length = indent.len();
            write!(f, "\n{indent}{}", if is_last { "└─ " } else { "├─ " })?;
            indent.push_str(if is_last { "   " } else { "│  " });
            child.draw(f, indent)?;
            indent.truncate(length);
        }
        Ok(())
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.draw(f, &mut String::new())
    }
}
