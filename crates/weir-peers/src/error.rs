//! Errors of the suite: always a sentence for the person who runs it.

/// A failure, as a sentence.
#[derive(Debug)]
pub struct Failure(pub String);

/// The result of a step of the suite.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// For `map_err`: the failed action and the reason.
    pub fn of<E: std::fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Failure {
        let what = what.into();
        move |error| Failure(format!("{what}: {error}"))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure(error.to_string())
    }
}
