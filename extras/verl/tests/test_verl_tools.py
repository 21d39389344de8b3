"""verl's classes of tools."""

import pytest

from data.tools import BaseTool
from extras.verl.compat import OpenAIFunctionParametersSchema, OpenAIFunctionSchema, OpenAIFunctionToolSchema


def test_verls_schema_classes_are_read_by_attribute_and_by_key():
    parameters = OpenAIFunctionParametersSchema(type="object", properties={"x": {"type": "string"}}, required=["x"])
    function = OpenAIFunctionSchema(name="f", description="Does.", parameters=parameters)
    schema = OpenAIFunctionToolSchema(type="function", function=function)
    assert schema.function.parameters.properties.x.type == "string"
    assert OpenAIFunctionToolSchema.model_validate(schema.model_dump(exclude_unset=True)) == schema
    assert BaseTool({}, schema).name == "f"
    schema.model_dump()["function"]["name"] = "other"  # of a dict of its own
    assert schema["function"]["name"] == "f"
    with pytest.raises(AttributeError, match="the schema has no 'nam'"):
        schema.nam  # noqa: B018
