//! DiskSpd's XML (`-Rxml`): each time span is a run. Element names are those of its public source
//! (`XmlResultParser`, `diskspd.xsd`).

use roxmltree::{Document, Node};

use super::{Parsed, cell, mix};
use crate::cell::{Direction, Pattern};
use crate::result::Measurement;

type Problem = (String, String);

/// The runs of a file: the profile has the load, the results have its figures, span by span.
pub fn parse(text: &str) -> Result<Vec<Parsed>, Problem> {
    let nowhere = |problem: &str| (String::new(), problem.to_owned());
    let document = Document::parse(text).map_err(|error| nowhere(&format!("not DiskSpd's XML: {error}")))?;
    let results = document.root_element();
    if !results.has_tag_name("Results") {
        let name = results.tag_name().name();
        return Err(nowhere(&format!("not DiskSpd's XML: it begins with <{name}>, not with <Results>")));
    }
    let asked = child(results, "Profile").and_then(|profile| child(profile, "TimeSpans"));
    let asked =
        asked.ok_or_else(|| nowhere("<Profile> with <TimeSpans> is missing: it has the parameters"))?;
    let (asked, measured) = (children(asked, "TimeSpan"), children(results, "TimeSpan"));
    if asked.len() != measured.len() || asked.is_empty() {
        let problem = format!("{} time spans were asked for, {} have results", asked.len(), measured.len());
        return Err(nowhere(&problem));
    }
    let span = |(index, (asked, measured)): (usize, (&Node<'_, '_>, &Node<'_, '_>))| {
        let place = format!(", time span {}", index + 1);
        let parsed = run(*asked, *measured).map_err(|problem| (place.clone(), problem))?;
        Ok(Parsed { place, ..parsed })
    };
    asked.iter().zip(&measured).enumerate().map(span).collect()
}

fn run(asked: Node<'_, '_>, measured: Node<'_, '_>) -> Result<Parsed, String> {
    if let Some(error) = text(measured, "Error") {
        return Err(format!("DiskSpd says: {error}"));
    }
    let targets = child(asked, "Targets").map_or_else(Vec::new, |targets| children(targets, "Target"));
    let [target] = targets.as_slice() else {
        return Err(format!("{} targets: one at a time can be compared", targets.len()));
    };
    let reads =
        100_u64.checked_sub(number(*target, "WriteRatio")?.unwrap_or(0)).ok_or("a write ratio above 100")?;
    let direction = mix(reads)?;
    let ratio = number(*target, "RandomRatio")?;
    if ratio.is_some_and(|ratio| (1..100).contains(&ratio)) {
        return Err("partly random offsets cannot be compared".to_owned());
    }
    let random = text(*target, "Random").is_some() || flag(*target, "RandomAccess") || ratio == Some(100);
    let pattern = if random { Pattern::Random } else { Pattern::Sequential };
    let through = flag(*target, "WriteThrough") || flag(*target, "DisableAllCache");
    let depth = number(*target, "RequestCount")?.unwrap_or(2);
    // `-F` gives threads to the whole span, `-t` to each file; 0 means that the option is not used.
    let of_span = number(asked, "ThreadCount")?.filter(|threads| *threads > 0);
    let threads = of_span.or(number(*target, "ThreadsPerFile")?).unwrap_or(1).max(1);
    let narrow = |number: u64| u32::try_from(number).map_err(|_| format!("{number} is too large"));
    let total = depth.checked_mul(threads).ok_or("too many requests in flight")?;
    let block = number(*target, "BlockSize")?.unwrap_or(64 << 10);
    let cell = cell(block, (pattern, direction), through, narrow(total)?, narrow(threads)?)?;
    Ok(Parsed { place: String::new(), cell, measurement: measurement(measured, direction)?, failed: None })
}

fn measurement(span: Node<'_, '_>, direction: Direction) -> Result<Measurement, String> {
    let seconds = decimal(span, "TestTimeSeconds")?.ok_or("<TestTimeSeconds> is missing")?;
    let (mut ios, mut bytes) = (0_u64, 0_u64);
    for thread in children(span, "Thread") {
        for target in children(thread, "Target") {
            let add = |sum: u64, name: &str| {
                let more = number(target, name)?.ok_or_else(|| format!("<{name}> is missing"))?;
                sum.checked_add(more).ok_or_else(|| format!("<{name}> is too large"))
            };
            (ios, bytes) = (add(ios, "IOCount")?, add(bytes, "BytesCount")?);
        }
    }
    if ios == 0 || seconds <= 0.0 {
        return Err("no I/O was completed".to_owned());
    }
    let prefix = match direction {
        Direction::Read => "Read",
        Direction::Write => "Write",
        Direction::Mixed(_) => "Total",
    };
    let latency = child(span, "Latency");
    let millis = |node: Option<Node<'_, '_>>, name: &str| match node {
        Some(node) => Ok(decimal(node, name)?.map(|millis| millis * 1e6)),
        None => Ok::<_, String>(None),
    };
    let percentile = |wanted: f64| {
        let buckets = latency.map_or_else(Vec::new, |latency| children(latency, "Bucket"));
        let is_it =
            |bucket: &Node<'_, '_>| matches!(decimal(*bucket, "Percentile"), Ok(Some(p)) if p == wanted);
        millis(buckets.into_iter().find(is_it), &format!("{prefix}Milliseconds"))
    };
    Ok(Measurement {
        iops: ios as f64 / seconds,
        mib_per_s: Some(bytes as f64 / seconds / f64::from(1 << 20)),
        mib_per_s_step: 0.0,
        mean_ns: millis(latency, &format!("Average{prefix}Milliseconds"))?,
        p50_ns: percentile(50.0)?,
        p99_ns: percentile(99.0)?,
        p99_9_ns: percentile(99.9)?,
        max_ns: percentile(100.0)?,
        ios: Some(ios),
        errors: 0,
        cpu_seconds: None,
        bytes: Some(bytes),
        runtime_seconds: Some(seconds),
        ..Measurement::default()
    })
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn children<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Vec<Node<'a, 'input>> {
    node.children().filter(|child| child.has_tag_name(name)).collect()
}

fn text<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name).map(|child| child.text().unwrap_or("").trim())
}

fn flag(node: Node<'_, '_>, name: &str) -> bool {
    text(node, name) == Some("true")
}

fn number(node: Node<'_, '_>, name: &str) -> Result<Option<u64>, String> {
    let parse =
        |text: &str| text.parse().map_err(|_| format!("<{name}> is {text:?}: a whole number is needed"));
    text(node, name).map(parse).transpose()
}

fn decimal(node: Node<'_, '_>, name: &str) -> Result<Option<f64>, String> {
    let parse = |text: &str| {
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
        number.ok_or_else(|| format!("<{name}> is {text:?}: a number is needed"))
    };
    text(node, name).map(parse).transpose()
}
