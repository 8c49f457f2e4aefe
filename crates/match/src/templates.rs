//! Templates that ranks of equal layout share.

use std::collections::HashMap;
use std::sync::Arc;

use crate::assign::Assignment;
use crate::error::TemplateError;
use crate::load::Load;
use crate::template::{Inner, Template};

/// Templates made so far. Pairs of ranks that send the same cells between equal layouts get the same one, however many
/// pairs there are and whichever call of [`assign`](crate::assign) they come from.
#[derive(Debug, Default)]
pub struct Templates {
    /// By all that a template is made of: a hash alone would let two tables that collide share pieces.
    made: HashMap<Arc<Load>, Arc<Inner>>,
}

impl Templates {
    /// What `source_rank` copies to the destination rank of the assignment for a pair of blocks.
    ///
    /// # Errors
    ///
    /// As [`Assignment::template`].
    pub fn template(&mut self, assignment: &Assignment, source_rank: u32) -> Result<Template, TemplateError> {
        let (load, source, destination) = assignment.between(source_rank)?;
        if let Some(inner) = self.made.get(load) {
            return Ok(Template::of(inner, source, destination));
        }
        let template = Template::new(load, source, destination)?;
        self.made.insert(Arc::clone(load), Arc::clone(&template.inner));
        Ok(template)
    }

    /// Different templates made so far.
    pub fn len(&self) -> usize {
        self.made.len()
    }

    /// Whether none has been made.
    pub fn is_empty(&self) -> bool {
        self.made.is_empty()
    }
}
