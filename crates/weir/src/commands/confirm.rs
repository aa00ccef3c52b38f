//! The question before data is deleted or replaced.

use std::io::{BufRead, IsTerminal, Write};

use crate::failure::Failure;

/// Makes the user type `name` on the terminal to confirm the action `would`.
///
/// # Errors
/// There is no terminal, and `--yes` was not given; or another name was typed.
pub fn confirm(would: &str, name: &str) -> Result<(), Failure> {
    let (stdin, mut stderr) = (std::io::stdin(), std::io::stderr());
    if !stdin.is_terminal() || !stderr.is_terminal() {
        let message = format!("there is no terminal to ask whether this is meant: {would}");
        return Err(Failure::refused(message)
            .hint("--yes does it without a question; --dry-run only says what it would do"));
    }
    write!(stderr, "{would}\nType {name} to go on: ")?;
    stderr.flush()?;
    let mut typed = String::new();
    stdin.lock().read_line(&mut typed)?;
    if typed.trim() == name {
        return Ok(());
    }
    Err(Failure::refused(format!("that is not {name}; nothing has changed")))
}
