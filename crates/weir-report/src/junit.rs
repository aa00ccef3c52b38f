//! Test suites as JUnit XML, for CI pipelines. The form is that of the Ant task's `junitreport`, which CI systems read.

use askama::Template;

use crate::svg::is_character;

/// A document.
#[derive(Debug, Template)]
#[template(path = "junit.xml", escape = "html")]
pub struct Document {
    /// The name of the generating program.
    pub name: String,
    /// Its suites.
    pub suites: Vec<Suite>,
}

/// A group of related cases.
#[derive(Debug)]
pub struct Suite {
    /// The group's name.
    pub name: String,
    /// The cases.
    pub cases: Vec<Case>,
}

/// One case.
#[derive(Debug)]
pub struct Case {
    /// The class name, with dots.
    pub class: String,
    /// The name of the test.
    pub name: String,
    /// The result.
    pub outcome: Outcome,
    /// The output; may be empty.
    pub said: String,
}

/// The result of a case.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The case passed.
    Passed,
    /// The case failed, with the reason.
    Failed(String),
    /// The case was skipped, with the reason.
    Skipped(String),
}

impl Suite {
    fn failures(&self) -> usize {
        self.cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed(_))).count()
    }

    fn skipped(&self) -> usize {
        self.cases.iter().filter(|case| matches!(case.outcome, Outcome::Skipped(_))).count()
    }
}

impl Document {
    /// The document as XML.
    ///
    /// # Errors
    /// Never in practice: the template only fails when its output cannot be written, and it writes to memory.
    pub fn xml(mut self) -> Result<String, crate::RenderError> {
        self.name = printable(&self.name);
        self.suites.iter_mut().for_each(|suite| suite.name = printable(&suite.name));
        for case in self.suites.iter_mut().flat_map(|suite| &mut suite.cases) {
            let reason = match &mut case.outcome {
                Outcome::Passed => None,
                Outcome::Failed(reason) | Outcome::Skipped(reason) => Some(reason),
            };
            for text in [&mut case.class, &mut case.name, &mut case.said].into_iter().chain(reason) {
                *text = printable(text);
            }
        }
        self.render()
    }
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if is_character(c) { c } else { ' ' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_reasons_are_in_the_document_whatever_they_hold() {
        let case = |outcome| Case {
            class: "a".into(),
            name: "b\u{1}\u{fffe}\u{ffff}<".into(),
            outcome,
            said: String::new(),
        };
        let cases = vec![
            case(Outcome::Passed),
            case(Outcome::Failed("too \"slow\"\n".into())),
            case(Outcome::Skipped("single run".into())),
        ];
        let suites = vec![Suite { name: "steps\u{b}".into(), cases }];
        let xml = Document { name: "test\u{ffff}".into(), suites }.xml().unwrap();
        let parsed = roxmltree::Document::parse(&xml).unwrap();
        let suite = parsed.descendants().find(|node| node.has_tag_name("testsuite")).unwrap();
        let counts = ["tests", "failures", "skipped"].map(|name| suite.attribute(name).unwrap());
        assert_eq!(counts, ["3", "1", "1"]);
        let failure = parsed.descendants().find(|node| node.has_tag_name("failure")).unwrap();
        assert_eq!(failure.attribute("message"), Some("too \"slow\" "));
    }
}
