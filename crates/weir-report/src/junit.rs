//! Test suites as JUnit XML, for pipelines that show it. The form is that of the Ant task's `junitreport`, as CI systems
//! read it.

use askama::Template;

use crate::svg::is_character;

/// A document.
#[derive(Debug, Template)]
#[template(path = "junit.xml", escape = "html")]
pub struct Document {
    /// What made it.
    pub name: String,
    /// Its suites.
    pub suites: Vec<Suite>,
}

/// Cases that belong together.
#[derive(Debug)]
pub struct Suite {
    /// What they have in common.
    pub name: String,
    /// The cases.
    pub cases: Vec<Case>,
}

/// One case.
#[derive(Debug)]
pub struct Case {
    /// What it is of, with dots.
    pub class: String,
    /// What is tested.
    pub name: String,
    /// What came of it.
    pub outcome: Outcome,
    /// What it printed; may be empty.
    pub said: String,
}

/// What came of a case.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should be.
    Passed,
    /// Not as it should be, and why.
    Failed(String),
    /// Not tested, and why.
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
