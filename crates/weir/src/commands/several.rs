//! Commands about several disks: what becomes of those with which it fails.

use std::collections::BTreeSet;

use weir_cluster::records::check_name;
use weir_node::units::count;

use crate::failure::{Failure, FailureKind};

/// The result of a command for each name.
pub type Each<'a, T> = Vec<(&'a String, Result<T, Failure>)>;

/// Refuses names that stand twice, and all that are no names.
///
/// # Errors
/// A usage error.
pub fn check_names(names: &[String]) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(*name)) {
        return Err(Failure::usage(format!("{twice} is named twice")));
    }
    let bad = names.iter().filter_map(|name| check_name(name).err().map(|error| (name, Err(error))));
    let bad: Each<'_, ()> = bad.map(|(name, error)| (name, error.map_err(Failure::usage))).collect();
    all_or_why(names, "name", "cannot be used", bad).1
}

/// Asks for each name, as long as there are answers.
///
/// # Errors
/// There was none.
pub fn ask_each<'a, T>(
    names: &'a [String],
    ask: impl Fn(&str) -> Result<T, Failure>,
) -> Result<Each<'a, T>, Failure> {
    let one = |name: &'a String| match ask(name) {
        Err(failure) if failure.kind == FailureKind::Unavailable => Err(failure),
        answer => Ok((name, answer)),
    };
    names.iter().map(one).collect()
}

/// The successful results, in the order of the command, and an error with the number of `names` that failed, these names, and the first reason.
/// `what`: a noun for the names; `failed`: the predicate for the error.
pub fn all_or_why<T>(
    names: &[String],
    what: &str,
    failed: &str,
    mut each: Each<'_, T>,
) -> (Vec<T>, Result<(), Failure>) {
    each.sort_by_key(|(name, _)| names.iter().position(|one| one == *name));
    let (mut done, mut missing) = (Vec::new(), Vec::new());
    for (name, one) in each {
        match one {
            Ok(one) => done.push(one),
            Err(failure) => missing.push((name, failure)),
        }
    }
    let which: Vec<&str> = missing.iter().map(|(name, _)| name.as_str()).collect();
    let (number, which, all) = (missing.len(), which.join(", "), count(names.len() as u64, what));
    let Some((name, failure)) = missing.into_iter().next() else { return (done, Ok(())) };
    if names.len() == 1 {
        return (done, Err(failure));
    }
    let why = failure.message.clone();
    let message = format!("{number} of {all} {failed}: {which}. The first, {name}: {why}");
    (done, Err(failure.said(message)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names(all: &[&str]) -> Vec<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn all_names_that_are_none_are_listed() {
        assert!(check_names(&names(&["a", "b"])).is_ok());
        let failure = check_names(&names(&["a", "b/c", "d", ".e"])).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Usage);
        assert!(failure.message.starts_with("2 of 4 names cannot be used: b/c, .e. "), "{}", failure.message);
        assert!(check_names(&names(&["a", "b", "a"])).unwrap_err().message.contains("a is named twice"));
    }

    #[test]
    fn all_that_fail_are_listed_and_a_node_that_does_not_answer_is_not_asked_again() {
        let all = names(&["a", "b", "c"]);
        let taken = |name: &str| match name {
            "b" => Ok(name.to_owned()),
            _ => Err(Failure::refused(format!("there is a disk {name} already"))),
        };
        let (done, failed) = all_or_why(&all, "clone", "cannot be made", ask_each(&all, taken).unwrap());
        assert_eq!(done, ["b"]);
        let said = "2 of 3 clones cannot be made: a, c. The first, a: there is a disk a already";
        assert_eq!(failed.unwrap_err().message, said);
        let asked = std::cell::Cell::new(0);
        let away = |_: &str| {
            asked.set(asked.get() + 1);
            Err::<(), _>(Failure::new(FailureKind::Unavailable, "no answer"))
        };
        assert!(ask_each(&all, away).is_err());
        assert_eq!(asked.get(), 1);
    }
}
