//! The text of a stack: names, with what they stand on and are set to in brackets.

use vpmm::caching::SettingError;

use crate::bytes::ByteCount;

/// What is wrong with the text of a stack.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// There is no resource of this name.
    #[error("there is no allocator {name:?}; known: {known}")]
    Unknown {
        /// What was asked for.
        name: Box<str>,
        /// What there is.
        known: Box<str>,
    },
    /// The brackets or quotes do not match, or something is outside of them.
    #[error("{text:?}: brackets or quotes that do not match")]
    Brackets {
        /// The text.
        text: Box<str>,
    },
    /// A setting that the resource does not have, or one too many.
    #[error("{name} takes no {given:?}; its form is {form}")]
    Excess {
        /// The resource.
        name: &'static str,
        /// What was given.
        given: Box<str>,
        /// What it takes.
        form: &'static str,
    },
    /// A setting that has to be given is not.
    #[error("{name} lacks its {what}; its form is {form}")]
    Missing {
        /// The resource.
        name: &'static str,
        /// What it lacks.
        what: &'static str,
        /// What it takes.
        form: &'static str,
    },
    /// More stand on each other than a thread's stack has room for to read, build and end them.
    #[error("at most {most} allocators stand on each other")]
    TooMany {
        /// How many may.
        most: usize,
    },
    /// One that makes memory itself was to stand on something.
    #[error("{name} stands on nothing")]
    OnNothing {
        /// The resource.
        name: &'static str,
    },
    /// Settings that the caching allocator does not take.
    #[error("{name}: {source}")]
    Settings {
        /// The resource.
        name: &'static str,
        /// What is wrong with them.
        source: SettingError,
    },
    /// A setting that is no number of bytes, or no number.
    #[error("{name}: {given:?} is no {what}")]
    Malformed {
        /// The resource.
        name: &'static str,
        /// What was given.
        given: Box<str>,
        /// What it should be.
        what: &'static str,
    },
}

/// A name and what is in its brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Expression {
    pub(super) name: Box<str>,
    pub(super) arguments: Vec<Argument>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    /// Before an equals sign.
    pub(super) key: Option<Box<str>>,
    /// The text, of a stack or of a value.
    pub(super) text: Box<str>,
}

/// Splits a list at the commas that are in no brackets and no quotes.
///
/// # Errors
/// [`StackError::Brackets`].
pub fn split_list(text: &str) -> Result<Vec<&str>, StackError> {
    let brackets = || StackError::Brackets { text: text.into() };
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0_usize);
    let mut is_quoted = false;
    for (at, letter) in text.char_indices() {
        match letter {
            // A quote in quotes is written twice, which ends and begins them.
            '"' => is_quoted = !is_quoted,
            _ if is_quoted => {}
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.checked_sub(1).ok_or_else(brackets)?,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if depth > 0 || is_quoted {
        return Err(brackets());
    }
    parts.push(text[start..].trim());
    Ok(parts)
}

pub(super) fn parse(text: &str) -> Result<Expression, StackError> {
    let text = text.trim();
    let Some((name, rest)) = text.split_once('(') else {
        return match text.contains(')') {
            true => Err(StackError::Brackets { text: text.into() }),
            false => Ok(Expression { name: text.into(), arguments: Vec::new() }),
        };
    };
    let inside = rest.strip_suffix(')').ok_or(StackError::Brackets { text: text.into() })?;
    let argument = |text: &str| {
        // An equals sign inside of brackets or quotes is somebody else's.
        let head = text.split(['(', '"']).next().unwrap_or_default();
        match head.split_once('=') {
            Some((key, _)) => {
                let value = text[key.len() + 1..].trim();
                Argument { key: Some(key.trim().into()), text: value.into() }
            }
            None => Argument { key: None, text: text.into() },
        }
    };
    let parts = if inside.trim().is_empty() { Vec::new() } else { split_list(inside)? };
    Ok(Expression {
        name: name.trim().into(),
        arguments: parts.into_iter().map(argument).collect(),
    })
}

/// A text in quotes, which may have any letter in it: for the name of a file in the text of a stack.
pub fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// A value as it was meant: without the quotes around it, if there are.
pub(super) fn unquoted(text: &str) -> Box<str> {
    match text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) {
        Some(inside) => inside.replace("\"\"", "\"").into(),
        None => text.into(),
    }
}

/// A number of bytes that a setting is.
pub(super) fn bytes(name: &'static str, text: &str) -> Result<u64, StackError> {
    let malformed = || StackError::Malformed { name, given: text.into(), what: "number of bytes" };
    text.parse::<ByteCount>().map(|count| count.0).map_err(|_| malformed())
}

/// A plain number that a setting is.
pub(super) fn number(name: &'static str, text: &str) -> Result<u32, StackError> {
    text.parse().map_err(|_| StackError::Malformed { name, given: text.into(), what: "number" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_arguments() {
        let expression = parse(" limiting( 1GiB , pool(a, max = 3) ,x=y(z=1))").unwrap();
        assert_eq!(&*expression.name, "limiting");
        let arguments: Vec<_> =
            expression.arguments.iter().map(|one| (one.key.as_deref(), &*one.text)).collect();
        assert_eq!(arguments, [(None, "1GiB"), (None, "pool(a, max = 3)"), (Some("x"), "y(z=1)")]);
        assert!(parse("a").unwrap().arguments.is_empty());
        assert!(parse("a()").unwrap().arguments.is_empty());
    }

    #[test]
    fn lists_are_split_outside_of_brackets() {
        assert_eq!(split_list("a, b(c,d(e,f)) ,g").unwrap(), ["a", "b(c,d(e,f))", "g"]);
        assert_eq!(split_list("").unwrap(), [""]);
    }

    #[test]
    fn quotes_have_anything_in_them() {
        for odd in ["a,b", "(", "x=1", "say \"so\"", "\"", "a)b,\"(\",c=", ""] {
            let text = format!("f({},g,k={})", quoted(odd), quoted(odd));
            let arguments = parse(&text).unwrap().arguments;
            let read: Vec<_> =
                arguments.iter().map(|one| (one.key.as_deref(), unquoted(&one.text))).collect();
            assert_eq!(read, [(None, odd.into()), (None, "g".into()), (Some("k"), odd.into())]);
        }
        assert!(split_list("\"a").is_err());
    }

    #[test]
    fn brackets_that_do_not_match() {
        for text in ["a(", "a)", "a(b", "a(b))", "a(b)c", ")(", "a(b)(c", "é(ü"] {
            let split = split_list(text)
                .and_then(|parts| parts.into_iter().map(parse).collect::<Result<Vec<_>, _>>());
            assert!(matches!(split, Err(StackError::Brackets { .. })), "{text}: {split:?}");
        }
    }
}
